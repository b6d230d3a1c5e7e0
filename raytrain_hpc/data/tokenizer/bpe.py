"""Byte-pair tokenizers: tiktoken rank files, Hugging Face tokenizer.json, and byte-level BPE trained on the input.

Nothing is downloaded. The text of the file identifies the tokenizer and suffices to restore it.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.tokenizer.base import Ids, validate_ids
from raytrain_hpc.errors import DataError

END_OF_TEXT = "<|endoftext|>"

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s"
)
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


@dataclass(frozen=True)
class _RankFileFormat:
    """Properties that a rank file does not contain: the pre-tokenization pattern and the special tokens."""

    pattern: str
    special_tokens: dict[str, int]
    end_of_text: str


def _build_llama3_special_tokens() -> dict[str, int]:
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}
    reserved_numbers = iter(range(256))
    return {f"<|{named.get(i) or f'reserved_special_token_{next(reserved_numbers)}'}|>": 128000 + i for i in range(256)}


# By number of ranks in the file.
_FORMATS_BY_RANK_COUNT = {
    50256: _RankFileFormat(_GPT2, {END_OF_TEXT: 50256}, END_OF_TEXT),  # gpt2, r50k_base
    50280: _RankFileFormat(_GPT2, {END_OF_TEXT: 50256}, END_OF_TEXT),  # p50k_base
    100256: _RankFileFormat(
        _CL100K,
        {
            END_OF_TEXT: 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
        END_OF_TEXT,
    ),
    199998: _RankFileFormat(_O200K, {END_OF_TEXT: 199999, "<|endofprompt|>": 200018}, END_OF_TEXT),
    128000: _RankFileFormat(_LLAMA3, _build_llama3_special_tokens(), "<|end_of_text|>"),
}


class TiktokenTokenizer:
    """Tokenizer from a tiktoken rank file: lines of base64 bytes and rank. Special tokens encode as ordinary text."""

    name = "tiktoken"

    def __init__(self, ranks: str):
        """Parse `ranks`, the text of the file. Raises DataError if it is invalid or tiktoken is not installed."""
        try:
            import tiktoken
        except ImportError as error:
            raise _make_missing_package_error("tiktoken") from error
        self._ranks = ranks
        ids_by_token = _parse_ranks(ranks)
        next_id = max(ids_by_token.values()) + 1
        file_format = _FORMATS_BY_RANK_COUNT.get(len(ids_by_token)) or _RankFileFormat(
            _CL100K, {END_OF_TEXT: next_id}, END_OF_TEXT
        )
        self._encoding = tiktoken.Encoding(
            "file", pat_str=file_format.pattern, mergeable_ranks=ids_by_token, special_tokens=file_format.special_tokens
        )
        self.vocab_size = int(self._encoding.n_vocab)
        self.end_of_text: int | None = file_format.special_tokens[file_format.end_of_text]
        self._is_valid_id = np.zeros(self.vocab_size, dtype=bool)  # cl100k and o200k have gaps between special tokens
        self._is_valid_id[[*ids_by_token.values(), *file_format.special_tokens.values()]] = True

    def encode(self, text: str) -> Ids:
        """Encode to token ids, int64[n]."""
        return np.asarray(self._encoding.encode_ordinary(text), dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text, in this thread."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Decode ids[n]; unassigned ids are skipped. Raises DataError for an id outside the vocabulary."""
        flat = validate_ids(ids, self.vocab_size)
        return str(self._encoding.decode(flat[self._is_valid_id[flat]].tolist()))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with the text of the rank file."""
        return {"name": self.name, "ranks": self._ranks}

    def __reduce__(self) -> tuple[object, ...]:
        return TiktokenTokenizer, (self._ranks,)


class HfTokenizer:
    """Tokenizer from a Hugging Face tokenizer.json. Special tokens encode as ordinary text; `encode` adds none."""

    def __init__(self, text: str, end_of_text: int | None, *, name: str = "hf"):
        """Parse `text`, the text of the file. Raises DataError if it is invalid or `tokenizers` is not installed."""
        try:
            import tokenizers
        except ImportError as error:
            raise _make_missing_package_error("tokenizers") from error
        self.name, self._text, self.end_of_text = name, text, end_of_text
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises a plain Exception
            raise DataError(f"not a tokenizer.json that `tokenizers` can read ({format_error(error)})") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size = int(largest) + 1

    def encode(self, text: str) -> Ids:
        """Encode to token ids, int64[n]."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text, in this thread unless TOKENIZERS_PARALLELISM enables threads."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Decode ids[n] to text. Raises DataError for an id outside the vocabulary."""
        flat = validate_ids(ids, self.vocab_size)
        return str(self._tokenizer.decode(flat.tolist(), skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if it is not in the vocabulary."""
        token_id = self._tokenizer.token_to_id(token)
        return None if token_id is None else int(token_id)

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, with the text of tokenizer.json."""
        return {"name": self.name, "tokenizer": self._text, "end_of_text": self.end_of_text}

    def __reduce__(self) -> tuple[object, ...]:
        # The package's own pickling would lose `encode_special_tokens`.
        return partial(HfTokenizer, name=self.name), (self._text, self.end_of_text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> HfTokenizer:
    """Train byte-level BPE with GPT-2's pre-tokenization on `texts`; little text may give fewer than `vocab_size`.

    Deterministic in the texts. Raises DataError if `tokenizers` is not installed.
    """
    try:
        from tokenizers import Tokenizer as Trained
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise _make_missing_package_error("tokenizers") from error
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return HfTokenizer(tokenizer.to_str(), tokenizer.token_to_id(END_OF_TEXT), name="bpe")


def _parse_ranks(text: str) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(f"line {number} of the rank file is not a base64 token and a rank") from error
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or len(set(ranks.values())) != len(ranks) or min(ranks.values()) < 0:
        raise DataError("not a valid rank file: single bytes are missing, or ranks are negative or duplicate")
    return ranks


def _make_missing_package_error(package: str) -> DataError:
    return DataError(f"this tokenizer needs the package {package}; run `pip install {package}`")


def format_error(error: BaseException) -> str:
    """Return the message of an error on one line, or its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
