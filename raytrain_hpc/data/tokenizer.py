"""Text to token ids and back. A tokenizer is plain data: its JSON form is stored in every dataset it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raytrain_hpc.errors import DataError

KINDS = ("byte", "char")
_CODE_POINTS = 0x110000


class Tokenizer(Protocol):
    """What training, sampling and `inspect` need of a tokenizer."""

    @property
    def name(self) -> str:
        """The kind, as `--tokenizer` takes it."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size)."""

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Token ids, int64[n]. DataError for text that the vocabulary does not cover."""

    def decode(self, ids: npt.ArrayLike) -> str:
        """The text of ids[n]. DataError for an id outside the vocabulary."""

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values; `tokenizer_from_json` reads it."""


class ByteTokenizer:
    """One token a byte of UTF-8: needs no vocabulary and takes any input."""

    name = "byte"
    vocab_size = 256

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """The bytes of `text`, int64[n]. Bytes that a command line could not decode come through as they were."""
        try:
            raw = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise DataError(f"text[{error.start}]={text[error.start]!r}: a lone surrogate is no character") from error
        return np.frombuffer(raw, dtype=np.uint8).astype(np.int64)

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids[n]; bytes that are no UTF-8 become U+FFFD. DataError for an id outside [0, 256)."""
        return _checked(ids, self.vocab_size).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values."""
        return {"name": self.name}


class CharTokenizer:
    """One token a character. Ids follow the sorted order of the characters."""

    name = "char"

    def __init__(self, chars: Iterable[str]):
        """`chars`: the characters of the vocabulary, in any order. DataError where there are none."""
        self.chars = "".join(sorted(set("".join(chars))))
        if not self.chars:
            raise DataError("a char tokenizer needs text to take its characters from")
        self._codes = _code_points(self.chars)
        # One entry past the largest known character, so that anything above it can be clipped onto an unknown one.
        self._ids = np.full(int(self._codes[-1]) + 2, -1, dtype=np.int64)
        self._ids[self._codes] = np.arange(len(self.chars))

    @property
    def vocab_size(self) -> int:
        """Number of characters."""
        return len(self.chars)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Token ids, int64[len(text)]. DataError naming the first character that is not in the vocabulary."""
        ids = self._ids[np.minimum(_code_points(text), len(self._ids) - 1)]
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            where = int(unknown[0])
            raise DataError(
                f"character {text[where]!r} (position {where}) is not in the vocabulary of {self.vocab_size} "
                "characters: use only characters of the training text, or tokenizer byte"
            )
        return ids

    def decode(self, ids: npt.ArrayLike) -> str:
        """Text of ids[n]. DataError for an id outside the vocabulary."""
        codes = self._codes[_checked(ids, self.vocab_size)]
        return codes.astype("<u4").tobytes().decode("utf-32-le", errors="surrogatepass")

    def to_json(self) -> dict[str, Any]:
        """The tokenizer as JSON values."""
        return {"name": self.name, "chars": self.chars}


def tokenizer_from_json(data: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `to_json` wrote. DataError where it is of no known kind."""
    name = data.get("name")
    if name == "byte":
        return ByteTokenizer()
    if name == "char" and isinstance(data.get("chars"), str):
        return CharTokenizer(data["chars"])
    raise DataError(f"tokenizer {name!r} of the dataset is not known here: known are {', '.join(KINDS)}")


def build_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer `spec` names ("byte" or "char"); its vocabulary, where it needs one, comes from `texts`."""
    if spec == "byte":
        return ByteTokenizer()
    if spec == "char":
        seen = np.zeros(_CODE_POINTS, dtype=bool)
        for text in texts:
            seen[_code_points(text)] = True
        return CharTokenizer(chr(code) for code in np.flatnonzero(seen))
    raise unknown_tokenizer(spec)


def unknown_tokenizer(spec: str) -> DataError:
    """The error for a tokenizer that cannot be built."""
    return DataError(f"tokenizer={spec!r}: known are {', '.join(KINDS)}")


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    """Unicode code points of `text`, uint32[len(text)]."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")


def _checked(ids: npt.ArrayLike, vocab_size: int) -> npt.NDArray[np.int64]:
    """`ids` as a flat int64 array, every id inside the vocabulary."""
    flat = np.asarray(ids, dtype=np.int64).ravel()
    outside = flat[(flat < 0) | (flat >= vocab_size)]
    if outside.size:
        raise DataError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
    return flat
