"""Tokenizer interface, and byte and character tokenizers. Every dataset stores its tokenizer as JSON.

Byte-pair tokenizers (tiktoken and Hugging Face files, and BPE trained on the input) are in bpe.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_hpc.errors import DataError

TOKENIZER_KINDS = ("byte", "char", "tiktoken:FILE", "hf:PATH", "bpe:VOCAB_SIZE")
Ids = npt.NDArray[np.int64]
_CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def name(self) -> str:
        """Kind: byte, char, tiktoken, hf or bpe."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; ids are in [0, vocab_size)."""

    @property
    def end_of_text(self) -> int | None:
        """Token that `prepare` appends to every document; None if the tokenizer has none."""

    def encode(self, text: str) -> Ids:
        """Encode to token ids, int64[n]. Raises DataError for text outside the vocabulary."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """Decode ids[n] to text. Raises DataError for an id outside the vocabulary."""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values from which `tokenizer_from_json` restores it without the original file."""


class ByteTokenizer:
    """Tokenizer with one token per byte of UTF-8. Accepts any input."""

    name = "byte"
    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> Ids:
        """Encode to bytes, int64[n]. Surrogate escapes of undecodable bytes give the original bytes."""
        try:
            raw = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise DataError(f"text[{error.start}]={text[error.start]!r}: a lone surrogate cannot be encoded") from error
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Decode ids[n]; invalid UTF-8 becomes U+FFFD. Raises DataError for an id outside [0, 256)."""
        return validate_ids(ids, self.vocab_size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"name": self.name}


class CharTokenizer:
    """Tokenizer with one token per character. Ids follow the sorted order of the characters."""

    name = "char"
    end_of_text: int | None = None

    def __init__(self, chars: Iterable[str]):
        """Build the vocabulary from `chars`, in any order. Raises DataError if there are none."""
        self.chars = "".join(sorted(set("".join(chars))))
        if not self.chars:
            raise DataError("a char tokenizer needs text for its vocabulary")
        self._codes = _to_code_points(self.chars)
        # One extra entry after the largest known character: larger code points are clipped to this unknown one.
        self._ids = np.full(int(self._codes[-1]) + 2, -1, dtype=np.int64)
        self._ids[self._codes] = np.arange(len(self.chars))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.chars)

    def encode(self, text: str) -> Ids:
        """Encode to ids, int64[len(text)]. Raises DataError naming the first character outside the vocabulary."""
        ids = self._ids[np.minimum(_to_code_points(text), len(self._ids) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            position = int(unknown[0])
            raise DataError(
                f"character {text[position]!r} (position {position}) is not in the vocabulary of {self.vocab_size} "
                "characters: use only characters of the training text, or tokenizer byte"
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Encode each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Decode ids[n] to text. Raises DataError for an id outside the vocabulary."""
        codes = self._codes[validate_ids(ids, self.vocab_size)]
        return codes.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {"name": self.name, "chars": self.chars}


@dataclass(frozen=True)
class TokenizerSpec:
    """Parsed value of `--tokenizer`: the kind, and the file, path or size after the colon."""

    kind: str
    argument: str = ""

    @property
    def identity(self) -> str:
        """Form recorded in the manifest. Omits paths: the manifest stores the content of the tokenizer."""
        return f"bpe:{self.argument}" if self.kind == "bpe" else self.kind

    @property
    def is_from_file(self) -> bool:
        """Whether the tokenizer is loaded from a file rather than built from the input."""
        return self.kind in ("tiktoken", "hf")


def parse_tokenizer_spec(spec: str) -> TokenizerSpec:
    """Parse the value of `--tokenizer`. Raises DataError for an unknown kind or a missing argument."""
    kind, colon, argument = spec.partition(":")
    if (kind in ("byte", "char") and not colon) or (kind in ("tiktoken", "hf") and argument):
        return TokenizerSpec(kind, argument)
    if kind == "bpe" and argument:
        if not argument.isdecimal() or int(argument) <= 256:
            raise DataError(f"tokenizer={spec!r}: the vocabulary needs at least 257 entries, e.g. bpe:8192")
        return TokenizerSpec(kind, str(int(argument)))
    raise DataError(f"tokenizer={spec!r}: unknown; known are {', '.join(TOKENIZER_KINDS)}")


def collect_characters(texts: Iterable[str]) -> str:
    """Collect the distinct characters of `texts`, sorted."""
    occurs = np.zeros(_CODE_POINTS, dtype=bool)
    for text in texts:
        occurs[_to_code_points(text)] = True
    return "".join(chr(code) for code in np.flatnonzero(occurs))


def validate_ids(ids: npt.ArrayLike, vocab_size: int) -> Ids:
    """Convert `ids` to a flat int64 array. Raises DataError for an id outside the vocabulary."""
    flat = np.asarray(ids, dtype=np.int64).ravel()
    outside = flat[(flat < 0) | (flat >= vocab_size)]
    if outside.size:
        raise DataError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return flat


def _to_code_points(text: str) -> npt.NDArray[np.uint32]:
    """Convert `text` to Unicode code points, uint32[len(text)]."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
