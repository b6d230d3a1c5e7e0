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

IGNORE_INDEX = -100  # target of a position that counts for no loss

PackingName = Literal["stream", "documents", "padded"]


@dataclass(frozen=True, eq=False)
class SampleRows:
    """n samples as they are read: compact, to be sent around.

    `tokens` integers [n, T + 1] of the stored type; `documents` integers [n, T + 1] numbered from 0 in each row, or
    None where all are one; `counted` bool[n, T + 1], which tokens count as targets, or None where all do.
    """

    tokens: npt.NDArray[Any]
    document_ids: npt.NDArray[Any] | None
    loss_mask: Bools | None

    def select(self, rows: slice) -> SampleRows:
        """Some of the rows, without a copy."""
        documents = None if self.document_ids is None else self.document_ids[rows]
        return SampleRows(self.tokens[rows], documents, None if self.loss_mask is None else self.loss_mask[rows])

    @property
    def nbytes(self) -> int:
        """What they hold."""
        return sum(part.nbytes for part in (self.tokens, self.document_ids, self.loss_mask) if part is not None)

    def pad_to(self, num_rows: int) -> SampleRows:
        """With rows behind that count for nothing, n in all."""
        missing = num_rows - len(self.tokens)
        if not missing:
            return self
        behind = [(0, missing), (0, 0)]
        documents = None if self.document_ids is None else np.pad(self.document_ids, behind)
        counted = np.ones(self.tokens.shape, dtype=bool) if self.loss_mask is None else self.loss_mask
        return SampleRows(np.pad(self.tokens, behind), documents, np.pad(counted, behind))

    def to_inputs(self) -> Ints:
        """The token at each position but the last, int64[n, T]."""
        return self.tokens[:, :-1].astype(np.int64)

    def to_targets(self) -> Ints:
        """The token after each position, int64[n, T], IGNORED where it counts for nothing."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.loss_mask is not None:
            targets[~self.loss_mask[:, 1:]] = IGNORE_INDEX
        if self.document_ids is not None:
            targets[self.document_ids[:, 1:] != self.document_ids[:, :-1]] = IGNORE_INDEX
        return targets


@dataclass(frozen=True)
class WindowPacking:
    """Windows [w * seq_len, w * seq_len + seq_len]: the last target is the next window's first input."""

    seq_len: int
    separate_documents: bool  # whether documents are kept apart

    def count_samples(self, source: TokenSource) -> int:
        """Whole windows: samples of an epoch."""
        return max(0, source.num_tokens - 1) // self.seq_len

    def count_eval_samples(self, source: TokenSource) -> int:
        """With what is left at the end, so that every target is in one."""
        return -(-max(0, source.num_tokens - 1) // self.seq_len)

    def count_start_positions(self, source: TokenSource) -> int:
        """Places at which a random sample can begin: every position that a whole window follows."""
        return max(0, source.num_tokens - self.seq_len)

    def locate(self, numbers: Ints) -> Ints:
        """Where the numbered samples begin."""
        return numbers * self.seq_len

    def read(self, source: TokenSource, positions: Ints) -> SampleRows:
        """The samples that begin at places int64[n]; one that the source ends in is padded with token 0."""
        whole = positions < source.num_tokens - self.seq_len
        if whole.all():
            return self._read_windows(source, positions)
        rows = list(np.flatnonzero(~whole)[:, None])
        parts = [self._read_last_window(source, int(place)) for place in positions[~whole]]
        if whole.any():
            rows.append(np.flatnonzero(whole))
            parts.append(self._read_windows(source, positions[whole]))
        return merge_rows(rows, parts)

    def _read_windows(self, source: TokenSource, positions: Ints) -> SampleRows:
        length = self.seq_len + 1
        documents = source.read_document_ids(positions, length) if self.separate_documents else None
        counted = source.read_loss_mask(positions, length) if source.masked else None
        return SampleRows(source.read(positions, length), documents, counted)

    def _read_last_window(self, source: TokenSource, position: int) -> SampleRows:
        at, size = np.array([position]), source.num_tokens - position
        documents = source.read_document_ids(at, size) if self.separate_documents else None
        return _pad_row(source.read(at, size), documents, _read_loss_mask(source, at, size), self.seq_len + 1)


@dataclass(frozen=True)
class PaddedPacking:
    """A document a sample, from its beginning: what lies behind the first seq_len + 1 tokens is not read."""

    seq_len: int

    def count_samples(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def count_eval_samples(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def count_start_positions(self, source: TokenSource) -> int:
        """Documents."""
        return source.num_documents

    def locate(self, numbers: Ints) -> Ints:
        """The same numbers."""
        return numbers

    def read(self, source: TokenSource, positions: Ints) -> SampleRows:
        """The documents numbered places int64[n]."""
        length = self.seq_len + 1
        starts, stops = source.get_document_spans(positions)
        sizes = np.minimum(stops - starts, length)
        rows = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            at = np.array([start])
            rows.append(_pad_row(source.read(at, size), None, _read_loss_mask(source, at, size), length))
        return merge_rows(list(np.arange(len(positions))[:, None]), rows)

    def count_truncated(self, source: TokenSource, batch_size: int = 1 << 20) -> int:
        """How many documents are longer than a sample, and so are read in part."""
        total = 0
        for first in range(0, source.num_documents, batch_size):
            starts, stops = source.get_document_spans(np.arange(first, min(first + batch_size, source.num_documents)))
            total += int((stops - starts > self.seq_len + 1).sum())
        return total


Packing = WindowPacking | PaddedPacking


def build_packing(name: PackingName, seq_len: int) -> Packing:
    """The packing that data.packing names."""
    return PaddedPacking(seq_len) if name == "padded" else WindowPacking(seq_len, name == "documents")


def check_source(packing: Packing, source: TokenSource, index: int) -> None:
    """DataError where a source has no sample."""
    if packing.count_samples(source):
        return
    if isinstance(packing, PaddedPacking):
        raise DataError(f"source {index} knows no documents and data.packing=padded reads them; use packing=stream")
    raise DataError(
        f"source {index} holds {source.num_tokens} tokens and train.seq_len={packing.seq_len} needs at least "
        f"{packing.seq_len + 1}: use a smaller seq_len or more text"
    )


def _read_loss_mask(source: TokenSource, starts: Ints, size: int) -> Bools:
    return source.read_loss_mask(starts, size) if source.masked else np.ones((len(starts), size), dtype=bool)


def _pad_row(tokens: npt.NDArray[Any], document_ids: Ints | None, loss_mask: Bools, length: int) -> SampleRows:
    """One row [1, m] as one of [1, length]."""
    behind = [(0, 0), (0, length - tokens.shape[1])]
    if document_ids is not None:
        document_ids = np.pad(document_ids, behind, mode="edge")
    return SampleRows(np.pad(tokens, behind), document_ids, np.pad(loss_mask, behind))


def merge_rows(indexes: Sequence[Ints], parts: Sequence[SampleRows]) -> SampleRows:
    """Rows of several reads, each in its places among all; tokens that one read does not mask count."""
    n, length = sum(len(rows) for rows in indexes), parts[0].tokens.shape[1]
    tokens = np.empty((n, length), dtype=parts[0].tokens.dtype)
    documents = None if parts[0].document_ids is None else np.empty((n, length), dtype=np.int64)
    masked = any(part.loss_mask is not None for part in parts)
    counted = np.ones((n, length), dtype=bool) if masked else None
    for rows, part in zip(indexes, parts, strict=True):
        tokens[rows] = part.tokens
        if documents is not None and part.document_ids is not None:
            documents[rows] = part.document_ids
        if counted is not None and part.loss_mask is not None:
            counted[rows] = part.loss_mask
    return SampleRows(tokens, documents, counted)
