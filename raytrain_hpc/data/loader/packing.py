"""How a source is cut into samples of seq_len positions, and what a sample holds.

stream      windows over all documents as one stream of tokens; a window may span documents.
documents   the same windows, but a token sees, and is predicted from, only its own document.
padded      a document a sample: cut after seq_len + 1 tokens, or padded with positions that count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.dataset.token_shards import Bools, Ints, TokenSource
from raytrain_hpc.errors import DataError

IGNORED = -100  # target of a position that counts for no loss

Name = Literal["stream", "documents", "padded"]


@dataclass(frozen=True, eq=False)
class Rows:
    """n samples as they are read: compact, to be sent around.

    `tokens` integers [n, T + 1] of the stored type; `documents` integers [n, T + 1] numbered from 0 in each row, or
    None where all are one; `counted` bool[n, T + 1], which tokens count as targets, or None where all do.
    """

    tokens: npt.NDArray[Any]
    documents: npt.NDArray[Any] | None
    counted: Bools | None

    def cut(self, rows: slice) -> Rows:
        """Some of the rows, without a copy."""
        documents = None if self.documents is None else self.documents[rows]
        return Rows(self.tokens[rows], documents, None if self.counted is None else self.counted[rows])

    @property
    def nbytes(self) -> int:
        """What they hold."""
        return sum(part.nbytes for part in (self.tokens, self.documents, self.counted) if part is not None)

    def filled(self, n: int) -> Rows:
        """With rows behind that count for nothing, n in all."""
        missing = n - len(self.tokens)
        if not missing:
            return self
        behind = [(0, missing), (0, 0)]
        documents = None if self.documents is None else np.pad(self.documents, behind)
        counted = np.ones(self.tokens.shape, dtype=bool) if self.counted is None else self.counted
        return Rows(np.pad(self.tokens, behind), documents, np.pad(counted, behind))

    def inputs(self) -> Ints:
        """The token at each position but the last, int64[n, T]."""
        return self.tokens[:, :-1].astype(np.int64)

    def targets(self) -> Ints:
        """The token after each position, int64[n, T], IGNORED where it counts for nothing."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.counted is not None:
            targets[~self.counted[:, 1:]] = IGNORED
        if self.documents is not None:
            targets[self.documents[:, 1:] != self.documents[:, :-1]] = IGNORED
        return targets


@dataclass(frozen=True)
class Windows:
    """Windows [w * seq_len, w * seq_len + seq_len]: the last target is the next window's first input."""

    seq_len: int
    apart: bool  # whether documents are kept apart

    def samples(self, source: TokenSource) -> int:
        """Whole windows: samples of an epoch."""
        return max(0, source.num_tokens - 1) // self.seq_len

    def all_samples(self, source: TokenSource) -> int:
        """With what is left at the end, so that every target is in one."""
        return -(-max(0, source.num_tokens - 1) // self.seq_len)

    def draws(self, source: TokenSource) -> int:
        """Places at which a random sample can begin: every position that a whole window follows."""
        return max(0, source.num_tokens - self.seq_len)

    def places(self, numbers: Ints) -> Ints:
        """Where the numbered samples begin."""
        return numbers * self.seq_len

    def read(self, source: TokenSource, places: Ints) -> Rows:
        """The samples that begin at places int64[n]; one that the source ends in is padded with token 0."""
        whole = places < source.num_tokens - self.seq_len
        if whole.all():
            return self._whole(source, places)
        rows = list(np.flatnonzero(~whole)[:, None])
        parts = [self._short(source, int(place)) for place in places[~whole]]
        if whole.any():
            rows.append(np.flatnonzero(whole))
            parts.append(self._whole(source, places[whole]))
        return interleave(rows, parts)

    def _whole(self, source: TokenSource, places: Ints) -> Rows:
        length = self.seq_len + 1
        documents = source.documents(places, length) if self.apart else None
        counted = source.counted(places, length) if source.masked else None
        return Rows(source.read(places, length), documents, counted)

    def _short(self, source: TokenSource, place: int) -> Rows:
        at, size = np.array([place]), source.num_tokens - place
        documents = source.documents(at, size) if self.apart else None
        return _padded(source.read(at, size), documents, _counted(source, at, size), self.seq_len + 1)


@dataclass(frozen=True)
class Padded:
    """A document a sample, from its beginning: what lies behind the first seq_len + 1 tokens is not read."""

    seq_len: int

    def samples(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def all_samples(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def draws(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def places(self, numbers: Ints) -> Ints:
        """The same numbers."""
        return numbers

    def read(self, source: TokenSource, places: Ints) -> Rows:
        """The documents numbered places int64[n]."""
        length = self.seq_len + 1
        starts, stops = source.spans(places)
        sizes = np.minimum(stops - starts, length)
        rows = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            at = np.array([start])
            rows.append(_padded(source.read(at, size), None, _counted(source, at, size), length))
        return interleave(list(np.arange(len(places))[:, None]), rows)

    def cut(self, source: TokenSource, block: int = 1 << 20) -> int:
        """How many documents are longer than a sample, and so are read in part."""
        total = 0
        for first in range(0, source.num_documents, block):
            starts, stops = source.spans(np.arange(first, min(first + block, source.num_documents)))
            total += int((stops - starts > self.seq_len + 1).sum())
        return total


Packing = Windows | Padded


def packing_of(name: Name, seq_len: int) -> Packing:
    """The packing that data.packing names."""
    return Padded(seq_len) if name == "padded" else Windows(seq_len, name == "documents")


def check_source(packing: Packing, source: TokenSource, index: int) -> None:
    """DataError where a source has no sample."""
    if packing.samples(source):
        return
    if isinstance(packing, Padded):
        raise DataError(f"source {index} knows no documents and data.packing=padded reads them; use packing=stream")
    raise DataError(
        f"source {index} holds {source.num_tokens} tokens and train.seq_len={packing.seq_len} needs at least "
        f"{packing.seq_len + 1}: use a smaller seq_len or more text"
    )


def _counted(source: TokenSource, at: Ints, size: int) -> Bools:
    return source.counted(at, size) if source.masked else np.ones((len(at), size), dtype=bool)


def _padded(tokens: npt.NDArray[Any], documents: Ints | None, counted: Bools, length: int) -> Rows:
    """One row [1, m] as one of [1, length]."""
    behind = [(0, 0), (0, length - tokens.shape[1])]
    if documents is not None:
        documents = np.pad(documents, behind, mode="edge")
    return Rows(np.pad(tokens, behind), documents, np.pad(counted, behind))


def interleave(places: Sequence[Ints], parts: Sequence[Rows]) -> Rows:
    """Rows of several reads, each in its places among all; tokens that one read does not mask count."""
    n, length = sum(len(rows) for rows in places), parts[0].tokens.shape[1]
    tokens = np.empty((n, length), dtype=parts[0].tokens.dtype)
    documents = None if parts[0].documents is None else np.empty((n, length), dtype=np.int64)
    masked = any(part.counted is not None for part in parts)
    counted = np.ones((n, length), dtype=bool) if masked else None
    for rows, part in zip(places, parts, strict=True):
        tokens[rows] = part.tokens
        if documents is not None and part.documents is not None:
            documents[rows] = part.documents
        if counted is not None and part.counted is not None:
            counted[rows] = part.counted
    return Rows(tokens, documents, counted)
