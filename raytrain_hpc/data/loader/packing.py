"""Packing: how documents are divided into samples of seq_len positions.

stream      windows over the concatenation of all documents; a window may span documents.
documents   the same windows, but attention and targets stay within a document.
padded      one document per sample: truncated to seq_len + 1 tokens, or padded with positions outside the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.dataset.token_shards import Bools, Ints, TokenSource
from raytrain_hpc.errors import DataError

IGNORE_INDEX = -100  # target of a position outside the loss

PackingName = Literal["stream", "documents", "padded"]


@dataclass(frozen=True, eq=False)
class SampleRows:
    """n samples in the compact form in which they are read and transferred.

    `tokens`: [n, T + 1] in the stored dtype; `document_ids`: integers [n, T + 1] numbered from 0 in each row, or None
    if documents are not separated; `loss_mask`: bool[n, T + 1], tokens that count as targets, or None if all do.
    """

    tokens: npt.NDArray[Any]
    document_ids: npt.NDArray[Any] | None
    loss_mask: Bools | None

    def select(self, rows: slice) -> SampleRows:
        """Select rows without copying them."""
        document_ids = None if self.document_ids is None else self.document_ids[rows]
        return SampleRows(self.tokens[rows], document_ids, None if self.loss_mask is None else self.loss_mask[rows])

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in (self.tokens, self.document_ids, self.loss_mask) if array is not None)

    def pad_to(self, num_rows: int) -> SampleRows:
        """Append rows outside the loss up to `num_rows` rows."""
        num_missing = num_rows - len(self.tokens)
        if not num_missing:
            return self
        padding = [(0, num_missing), (0, 0)]
        document_ids = None if self.document_ids is None else np.pad(self.document_ids, padding)
        loss_mask = np.ones(self.tokens.shape, dtype=bool) if self.loss_mask is None else self.loss_mask
        return SampleRows(np.pad(self.tokens, padding), document_ids, np.pad(loss_mask, padding))

    def to_inputs(self) -> Ints:
        """Return the input tokens, int64[n, T]: all but the last position."""
        return self.tokens[:, :-1].astype(np.int64)

    def to_targets(self) -> Ints:
        """Return the token after each input, int64[n, T]; IGNORE_INDEX outside the loss."""
        targets = self.tokens[:, 1:].astype(np.int64)
        if self.loss_mask is not None:
            targets[~self.loss_mask[:, 1:]] = IGNORE_INDEX
        if self.document_ids is not None:
            targets[self.document_ids[:, 1:] != self.document_ids[:, :-1]] = IGNORE_INDEX
        return targets


@dataclass(frozen=True)
class WindowPacking:
    """Windows [w * seq_len, w * seq_len + seq_len]; the last target is the first input of the next window."""

    seq_len: int
    separate_documents: bool  # keep attention and targets within a document

    def count_samples(self, source: TokenSource) -> int:
        """Count the full windows: samples per epoch."""
        return max(0, source.num_tokens - 1) // self.seq_len

    def count_eval_samples(self, source: TokenSource) -> int:
        """Count the windows including a short last one, so that every target is covered."""
        return -(-max(0, source.num_tokens - 1) // self.seq_len)

    def count_start_positions(self, source: TokenSource) -> int:
        """Count the positions at which a full window can start, for order=random."""
        return max(0, source.num_tokens - self.seq_len)

    def locate(self, numbers: Ints) -> Ints:
        """Return the first position of each numbered sample."""
        return numbers * self.seq_len

    def read(self, source: TokenSource, positions: Ints) -> SampleRows:
        """Read the windows that start at positions int64[n]; pad one that exceeds the source with token 0."""
        is_full = positions < source.num_tokens - self.seq_len
        if is_full.all():
            return self._read_windows(source, positions)
        rows = list(np.flatnonzero(~is_full)[:, None])
        parts = [self._read_last_window(source, int(position)) for position in positions[~is_full]]
        if is_full.any():
            rows.append(np.flatnonzero(is_full))
            parts.append(self._read_windows(source, positions[is_full]))
        return merge_rows(rows, parts)

    def _read_windows(self, source: TokenSource, positions: Ints) -> SampleRows:
        length = self.seq_len + 1
        document_ids = source.read_document_ids(positions, length) if self.separate_documents else None
        loss_mask = source.read_loss_mask(positions, length) if source.masked else None
        return SampleRows(source.read(positions, length), document_ids, loss_mask)

    def _read_last_window(self, source: TokenSource, position: int) -> SampleRows:
        starts, size = np.array([position]), source.num_tokens - position
        document_ids = source.read_document_ids(starts, size) if self.separate_documents else None
        return _pad_row(
            source.read(starts, size), document_ids, _read_loss_mask(source, starts, size), self.seq_len + 1
        )


@dataclass(frozen=True)
class PaddedPacking:
    """One document per sample, truncated to its first seq_len + 1 tokens."""

    seq_len: int

    def count_samples(self, source: TokenSource) -> int:
        """Count the documents: samples per epoch."""
        return source.num_documents

    def count_eval_samples(self, source: TokenSource) -> int:
        """Count the documents: none is left over."""
        return source.num_documents

    def count_start_positions(self, source: TokenSource) -> int:
        """Count the documents: a random sample is a whole document."""
        return source.num_documents

    def locate(self, numbers: Ints) -> Ints:
        """Return `numbers`: samples are addressed by document number."""
        return numbers

    def read(self, source: TokenSource, positions: Ints) -> SampleRows:
        """Read the documents numbered positions int64[n]."""
        length = self.seq_len + 1
        starts, stops = source.get_document_spans(positions)
        sizes = np.minimum(stops - starts, length)
        rows = []
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            window_starts = np.array([start])
            rows.append(
                _pad_row(source.read(window_starts, size), None, _read_loss_mask(source, window_starts, size), length)
            )
        return merge_rows(list(np.arange(len(positions))[:, None]), rows)

    def count_truncated(self, source: TokenSource, batch_size: int = 1 << 20) -> int:
        """Count the documents that are longer than a sample and thus truncated."""
        total = 0
        for first in range(0, source.num_documents, batch_size):
            starts, stops = source.get_document_spans(np.arange(first, min(first + batch_size, source.num_documents)))
            total += int((stops - starts > self.seq_len + 1).sum())
        return total


Packing = WindowPacking | PaddedPacking


def build_packing(name: PackingName, seq_len: int) -> Packing:
    """Build the packing selected by data.packing."""
    return PaddedPacking(seq_len) if name == "padded" else WindowPacking(seq_len, name == "documents")


def check_source(packing: Packing, source: TokenSource, name: str) -> None:
    """Raise DataError if a source has no sample. `name`: its key and path, for the message."""
    if packing.count_samples(source):
        return
    if isinstance(packing, PaddedPacking):
        raise DataError(f"{name}: it has no documents, which data.packing=padded needs; use data.packing=stream")
    raise DataError(
        f"{name}: it holds {source.num_tokens} tokens, and train.seq_len={packing.seq_len} needs at least "
        f"{packing.seq_len + 1}; set a smaller train.seq_len, or prepare more text"
    )


def _read_loss_mask(source: TokenSource, starts: Ints, size: int) -> Bools:
    return source.read_loss_mask(starts, size) if source.masked else np.ones((len(starts), size), dtype=bool)


def _pad_row(tokens: npt.NDArray[Any], document_ids: Ints | None, loss_mask: Bools, length: int) -> SampleRows:
    """Pad a row [1, m] to [1, length]."""
    padding = [(0, 0), (0, length - tokens.shape[1])]
    if document_ids is not None:
        document_ids = np.pad(document_ids, padding, mode="edge")
    return SampleRows(np.pad(tokens, padding), document_ids, np.pad(loss_mask, padding))


def merge_rows(indexes: Sequence[Ints], parts: Sequence[SampleRows]) -> SampleRows:
    """Merge several reads, each given with the indexes of its rows. Reads without a loss mask count all tokens."""
    num_rows, length = sum(len(rows) for rows in indexes), parts[0].tokens.shape[1]
    tokens = np.empty((num_rows, length), dtype=parts[0].tokens.dtype)
    document_ids = None if parts[0].document_ids is None else np.empty((num_rows, length), dtype=np.int64)
    masked = any(part.loss_mask is not None for part in parts)
    loss_mask = np.ones((num_rows, length), dtype=bool) if masked else None
    for rows, part in zip(indexes, parts, strict=True):
        tokens[rows] = part.tokens
        if document_ids is not None and part.document_ids is not None:
            document_ids[rows] = part.document_ids
        if loss_mask is not None and part.loss_mask is not None:
            loss_mask[rows] = part.loss_mask
    return SampleRows(tokens, document_ids, loss_mask)
