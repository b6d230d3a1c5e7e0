"""Datasets of the user, map-style and streams: their order, their readers, and what identifies them."""
