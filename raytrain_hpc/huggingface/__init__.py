"""Import and export of Hugging Face models: config.json, safetensors shards and tokenizer files."""
