"""Data pipeline: text to token shards, and token shards to microbatches in an order independent of the layout."""
