"""Checkpoints on disk: verified, published atomically, loadable in any layout."""
