"""Tokenizers by kind: loaded from files that users name, and restored from a dataset's manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytrain_hpc.data.tokenizer.base import TOKENIZER_KINDS, ByteTokenizer, CharTokenizer, Tokenizer, TokenizerSpec
from raytrain_hpc.data.tokenizer.bpe import END_OF_TEXT, HfTokenizer, TiktokenTokenizer, format_error
from raytrain_hpc.errors import DataError

# Usual end-of-document tokens, most specific first.
_END_OF_TEXT_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "<|endofdoc|>", "</s>", "<eos>", "<|eos|>")


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Load the tokenizer of tiktoken:FILE or hf:PATH. Raises DataError naming the file if it cannot be used."""
    path = Path(spec.argument).expanduser()
    if spec.kind == "hf" and path.is_dir():
        path = path / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(
            f"tokenizer={spec.kind}:{spec.argument}: {path} cannot be read ({format_error(error)})"
        ) from error
    try:
        if spec.kind == "tiktoken":
            return TiktokenTokenizer(text)
        return HfTokenizer(text, _find_end_of_text(HfTokenizer(text, None), path))
    except DataError as error:
        raise DataError(f"tokenizer={spec.kind}:{spec.argument}: {error}") from error


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """Restore a tokenizer from the output of `to_json`. Raises DataError if its kind is unknown or it is damaged."""
    name = data.get("name")
    if name == "byte":
        return ByteTokenizer()
    if name == "char" and isinstance(data.get("chars"), str):
        return CharTokenizer(data["chars"])
    if name == "tiktoken" and isinstance(data.get("ranks"), str):
        return TiktokenTokenizer(data["ranks"])
    if name in ("hf", "bpe") and isinstance(data.get("tokenizer"), str):
        return HfTokenizer(data["tokenizer"], data.get("end_of_text"), name=str(name))
    raise DataError(f"tokenizer {name!r} of the dataset is unknown; known are {', '.join(TOKENIZER_KINDS)}")


def _find_end_of_text(tokenizer: HfTokenizer, path: Path) -> int | None:
    """Find the end-of-text id: eos_token of tokenizer_config.json next to the file, else a usual token name."""
    config = path.parent / "tokenizer_config.json"
    if config.is_file():
        try:
            eos = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{config} cannot be read ({format_error(error)})") from error
        token = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(token, str) and (token_id := tokenizer.token_to_id(token)) is not None:
            return token_id
    return next(
        (token_id for token in _END_OF_TEXT_TOKENS if (token_id := tokenizer.token_to_id(token)) is not None), None
    )
