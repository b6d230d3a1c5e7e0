"""Validation batches: a whole split, every target once."""

from __future__ import annotations

import numpy as np

from raytrain_hpc.data.dataset.token_shards import TokenSource
from raytrain_hpc.data.loader.packing import Packing
from raytrain_hpc.data.loader.stream import Microbatch
from raytrain_hpc.errors import DataError


class EvaluationSet:
    """The samples of a split, one after the other, in batches of one shape.

    The last window may be short and the last batch incomplete: both are padded with input 0 and target -100, so that
    the targets of the split count exactly once. `limit` > 0 takes that many samples instead, spread evenly.
    """

    def __init__(self, tokens: TokenSource, packing: Packing, batch: int, limit: int = 0):
        """`batch`: samples a batch. DataError where the split holds no target."""
        if tokens.num_tokens < 2:
            raise DataError(f"validation split of {tokens.num_tokens} tokens: needs at least 2")
        if packing.seq_len < 1 or batch < 1 or limit < 0:
            raise DataError(f"evaluation of seq_len={packing.seq_len}, batch={batch}, limit={limit}: not a size")
        self._tokens, self._packing, self._batch = tokens, packing, batch
        self._available = packing.all_samples(tokens)
        self.num_samples = min(limit, self._available) if limit else self._available

    @property
    def num_batches(self) -> int:
        """Batches in an evaluation."""
        return -(-self.num_samples // self._batch)

    def batch(self, index: int) -> Microbatch:
        """Batch `index` in [0, num_batches). DataError outside."""
        if not 0 <= index < self.num_batches:
            raise DataError(f"evaluation batch {index}: there are {self.num_batches}")
        chosen = np.arange(index * self._batch, min((index + 1) * self._batch, self.num_samples))
        numbers = chosen * self._available // self.num_samples
        rows = self._packing.read(self._tokens, self._packing.places(numbers)).filled(self._batch)
        return Microbatch(np.pad(numbers, (0, self._batch - numbers.size), constant_values=-1), rows)
