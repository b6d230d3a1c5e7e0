"""Text to token ids and back. A tokenizer is plain data: its JSON form is stored in every dataset it wrote.

Bytes and characters are here; byte pairs (tiktoken and Hugging Face files, and those trained here) are in bpe.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_hpc.errors import DataError

TOKENIZER_KINDS = ("byte", "char", "tiktoken:FILE", "hf:PATH", "bpe:VOCAB_SIZE")
Ids = npt.NDArray[np.int64]
_CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """What preparing, training, sampling and `inspect` need of a tokenizer."""

    @property
    def name(self) -> str:
        """The kind: byte, char, tiktoken, hf or bpe."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    @property
    def end_of_text(self) -> int | None:
        """The token that `prepare` puts after every document; None where the tokenizer has none."""

    def encode(self, text: str) -> Ids:
        """Token ids, int64[n]. DataError for text that the vocabulary does not cover."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids[n]. DataError for an id outside the vocabulary."""

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values; `tokenizer_from_json` reads it anywhere, without the file it came from."""


class ByteTokenizer:
    """One token a byte of UTF-8: needs no vocabulary and takes any input."""

    name = "byte"
    vocab_size = 256
    end_of_text: int | None = None

    def encode(self, text: str) -> Ids:
        """The bytes of `text`, int64[n]. Bytes that a command line could not decode come through as they were."""
        try:
            raw = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise DataError(f"text[{error.start}]={text[error.start]!r}: a lone surrogate is no character") from error
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids[n]; bytes that are no UTF-8 become U+FFFD. DataError for an id outside [0, 256)."""
        return validate_ids(ids, self.vocab_size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values."""
        return {"name": self.name}


class CharTokenizer:
    """One token a character. Ids follow the sorted order of the characters."""

    name = "char"
    end_of_text: int | None = None

    def __init__(self, chars: Iterable[str]):
        """`chars`: the characters of the vocabulary, in any order. DataError where there are none."""
        self.chars = "".join(sorted(set("".join(chars))))
        if not self.chars:
            raise DataError("a char tokenizer needs text to take its characters from")
        self._codes = _to_code_points(self.chars)
        # One entry past the largest known character, so that anything above it can be clipped onto an unknown one.
        self._ids = np.full(int(self._codes[-1]) + 2, -1, dtype=np.int64)
        self._ids[self._codes] = np.arange(len(self.chars))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.chars)

    def encode(self, text: str) -> Ids:
        """Token ids, int64[len(text)]. DataError naming the first character that is not in the vocabulary."""
        ids = self._ids[np.minimum(_to_code_points(text), len(self._ids) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            where = int(unknown[0])
            raise DataError(
                f"character {text[where]!r} (position {where}) is not in the vocabulary of {self.vocab_size} "
                "characters: use only characters of the training text, or tokenizer byte"
            )
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids[n]. DataError for an id outside the vocabulary."""
        codes = self._codes[validate_ids(ids, self.vocab_size)]
        return codes.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values."""
        return {"name": self.name, "chars": self.chars}


@dataclass(frozen=True)
class TokenizerSpec:
    """`--tokenizer`, taken apart: the kind, and the file, path or size after the colon."""

    kind: str
    argument: str = ""

    @property
    def identity(self) -> str:
        """What a manifest says of it. A path is left out: the tokenizer's content is in the manifest."""
        return f"bpe:{self.argument}" if self.kind == "bpe" else self.kind

    @property
    def is_from_file(self) -> bool:
        """Whether the tokenizer is there before any input is read."""
        return self.kind in ("tiktoken", "hf")


def parse_tokenizer_spec(spec: str) -> TokenizerSpec:
    """Take `--tokenizer` apart. DataError where it is of no known kind or lacks its argument."""
    kind, colon, argument = spec.partition(":")
    if (kind in ("byte", "char") and not colon) or (kind in ("tiktoken", "hf") and argument):
        return TokenizerSpec(kind, argument)
    if kind == "bpe" and argument:
        if not argument.isdecimal() or int(argument) <= 256:
            raise DataError(f"tokenizer={spec!r}: the vocabulary needs at least 257 entries, as in bpe:8192")
        return TokenizerSpec(kind, str(int(argument)))
    raise DataError(f"tokenizer={spec!r}: known are {', '.join(TOKENIZER_KINDS)}")


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` wrote. DataError where it is of no known kind, or damaged."""
    name = data.get("name")
    if name == "byte":
        return ByteTokenizer()
    if name == "char" and isinstance(data.get("chars"), str):
        return CharTokenizer(data["chars"])
    from raytrain_hpc.data.tokenizer.bpe import HfTokenizer, TiktokenTokenizer  # which imports this module

    if name == "tiktoken" and isinstance(data.get("ranks"), str):
        return TiktokenTokenizer(data["ranks"])
    if name in ("hf", "bpe") and isinstance(data.get("tokenizer"), str):
        return HfTokenizer(data["tokenizer"], data.get("end_of_text"), name=str(name))
    raise DataError(f"tokenizer {name!r} of the dataset is not known here: known are {', '.join(TOKENIZER_KINDS)}")


def collect_characters(texts: Iterable[str]) -> str:
    """Every character that occurs in `texts`, sorted."""
    seen = np.zeros(_CODE_POINTS, dtype=bool)
    for text in texts:
        seen[_to_code_points(text)] = True
    return "".join(chr(code) for code in np.flatnonzero(seen))


def validate_ids(ids: npt.ArrayLike, vocab_size: int) -> Ids:
    """`ids` as a flat int64 array. DataError for an id outside the vocabulary."""
    flat = np.asarray(ids, dtype=np.int64).ravel()
    outside = flat[(flat < 0) | (flat >= vocab_size)]
    if outside.size:
        raise DataError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return flat


def _to_code_points(text: str) -> npt.NDArray[np.uint32]:
    """Unicode code points of `text`, uint32[len(text)]."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
