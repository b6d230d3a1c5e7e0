"""Models from and to Hugging Face's files: config.json, safetensors in shards, tokenizer files."""
