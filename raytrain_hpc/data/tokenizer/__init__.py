"""Tokenizers as plain data: byte, char, BPE, tiktoken and Hugging Face files."""
