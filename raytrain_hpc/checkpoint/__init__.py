"""Checkpoints on disk: verified, atomically published, loadable on any layout."""
