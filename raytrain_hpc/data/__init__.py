"""Text to token shards, and token shards to microbatches in an order that no layout changes."""
