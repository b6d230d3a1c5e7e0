"""Settings: documented schema, loading and merging, validation, model presets and the resolved model spec."""
