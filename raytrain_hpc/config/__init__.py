"""Settings: their schema with documentation, loading and layering, rules between keys, and model presets."""
