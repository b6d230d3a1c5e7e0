"""Validation batches: consecutive windows over a whole split, every target once."""

from __future__ import annotations

import numpy as np

from raytrain_hpc.data.shards import TokenSource
from raytrain_hpc.data.stream import IGNORED, Microbatch
from raytrain_hpc.errors import DataError


class EvaluationSet:
    """A split of N tokens as ceil((N - 1) / seq_len) windows in batches of one shape.

    The last window may be short and the last batch incomplete: both are padded with input 0 and target -100, so that
    the N - 1 targets of the split count exactly once. `limit` > 0 takes that many windows instead, spread evenly.
    """

    def __init__(self, tokens: TokenSource, seq_len: int, batch: int, limit: int = 0):
        """`seq_len` tokens a window, `batch` windows a batch. DataError where the split holds no target."""
        if tokens.num_tokens < 2:
            raise DataError(f"validation split of {tokens.num_tokens} tokens: needs at least 2")
        if seq_len < 1 or batch < 1 or limit < 0:
            raise DataError(f"evaluation of seq_len={seq_len}, batch={batch}, limit={limit}: not a positive size")
        self._tokens, self._seq_len, self._batch = tokens, seq_len, batch
        self._available = -(-(tokens.num_tokens - 1) // seq_len)
        self.num_windows = min(limit, self._available) if limit else self._available

    @property
    def num_batches(self) -> int:
        """Batches in an evaluation."""
        return -(-self.num_windows // self._batch)

    def batch(self, index: int) -> Microbatch:
        """Batch `index` in [0, num_batches). DataError outside."""
        if not 0 <= index < self.num_batches:
            raise DataError(f"evaluation batch {index}: there are {self.num_batches}")
        chosen = np.arange(index * self._batch, min((index + 1) * self._batch, self.num_windows))
        windows = chosen * self._available // self.num_windows
        inputs = np.zeros((self._batch, self._seq_len), dtype=np.int64)
        targets = np.full_like(inputs, IGNORED)
        samples = np.full(self._batch, -1, dtype=np.int64)
        samples[: windows.size] = windows
        starts = windows * self._seq_len
        sizes = np.minimum(self._seq_len, self._tokens.num_tokens - 1 - starts)
        for size in np.unique(sizes):  # whole windows, and at most one short one
            rows = np.flatnonzero(sizes == size)
            read = self._tokens.read(starts[rows], int(size) + 1)
            inputs[rows, :size], targets[rows, :size] = read[:, :-1], read[:, 1:]
        return Microbatch(inputs, targets, samples, int(sizes.sum()))
