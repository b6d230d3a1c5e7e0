"""Export of a tokenizer to the files that Hugging Face libraries read."""

from __future__ import annotations

import json
from typing import Any

from raytrain_hpc.data.tokenizer.base import ByteTokenizer, CharTokenizer, Tokenizer


def build_tokenizer_files(tokenizer: Tokenizer, max_positions: int) -> dict[str, str]:
    """Build the text of tokenizer.json and tokenizer_config.json, by file name; empty for kinds without such a form.

    `max_positions`: context length of the model. Byte and char tokenizers become BPE without merges.
    """
    data = tokenizer.to_json()
    if isinstance(tokenizer, ByteTokenizer):
        vocabulary = {character: byte for byte, character in enumerate(_bytes_to_unicode())}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        text = _build_bpe_json(vocabulary, byte_level, byte_level)
    elif isinstance(tokenizer, CharTokenizer):
        text = _build_bpe_json({character: i for i, character in enumerate(tokenizer.chars)}, None, {"type": "Fuse"})
    elif "tokenizer" in data:
        text = str(data["tokenizer"])
    else:
        return {}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.end_of_text is not None:
        config["eos_token"] = tokenizer.decode([tokenizer.end_of_text])
    return {"tokenizer.json": text, "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def _build_bpe_json(vocab: dict[str, int], pre_tokenizer: dict[str, Any] | None, decoder: dict[str, Any]) -> str:
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [],
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(tokenizer, ensure_ascii=False)


def _bytes_to_unicode() -> list[str]:
    """Return the character that represents each byte: itself if printable in Latin-1, else the next from 256 on.

    The table of byte-level BPE (Radford et al. 2019).
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    replacements = iter(range(256, 512))
    return [chr(byte) if byte in set(printable) else chr(next(replacements)) for byte in range(256)]
