"""Datasets on disk or in an object store: manifest, token shards, sources, storage."""
