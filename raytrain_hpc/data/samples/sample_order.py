"""Order of the samples of a map-style dataset: which samples each logical microbatch of a step consists of."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from raytrain_hpc.data.loader.sampler import Ints, Mixture, OrderName, Permutation, Sampler, derive_key
from raytrain_hpc.errors import DataError


class SampleOrder:
    """Map from (step, microbatch) to samples, a pure function of seed and sizes, independent of ranks.

    Step k consumes samples [kB, (k+1)B) of the run; the sampler maps them to indexes of the dataset. With `lengths`,
    the samples of `bucket_steps` consecutive steps are sorted by length and divided into microbatches, which are dealt
    to these steps in random order: every sample still occurs once per epoch, and microbatches need little padding.
    """

    def __init__(
        self,
        size: int,
        *,
        kind: OrderName,
        seed: int,
        global_batch_size: int,
        micro_batch_size: int,
        lengths: np.ndarray[Any, Any] | None = None,
        bucket_steps: int = 1,
    ):
        """Validate the sizes. Raises DataError for an empty dataset or a wrong number of lengths."""
        if size < 1:
            raise DataError("dataset: it is empty; __len__ must return at least 1")
        if lengths is not None and lengths.shape != (size,):
            raise DataError(f"lengths: shape {list(lengths.shape)} for a dataset of {size} samples; one per sample")
        if lengths is not None and kind == "random":
            raise DataError("lengths: data.order=random draws samples per microbatch, which cannot be sorted by length")
        self._sampler = Sampler([size], [Mixture(0, (1.0,))], kind=kind, seed=seed)
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self._lengths, self._bucket_steps, self._seed = lengths, bucket_steps, seed
        self._sort_window = lru_cache(maxsize=2)(self._sort_window_uncached)

    @property
    def num_microbatches(self) -> int:
        """Number of logical microbatches per step, V."""
        return self.global_batch_size // self.micro_batch_size

    def locate(self, step: int, microbatch: int) -> tuple[Ints, Ints]:
        """Return the sample numbers of the run, int64[b], and their indexes in the dataset, int64[b]."""
        if self._lengths is not None:
            window, offset = divmod(step, self._bucket_steps)
            samples, indexes = self._sort_window(window)
            row = offset * self.num_microbatches + microbatch
            return samples[row], indexes[row]
        first = step * self.global_batch_size + microbatch * self.micro_batch_size
        samples = first + np.arange(self.micro_batch_size, dtype=np.int64)
        if self._sampler.kind == "random":
            return samples, self._sampler.locate_random(step, microbatch, samples)[1]
        return samples, self._sampler.locate(samples)[1]

    def _sort_window_uncached(self, window: int) -> tuple[Ints, Ints]:
        """Return samples and indexes of all microbatches of a window of steps, int64[microbatches, b] each."""
        if self._lengths is None:
            raise DataError("a dataset without lengths has no windows")
        count = self._bucket_steps * self.global_batch_size
        samples = window * count + np.arange(count, dtype=np.int64)
        indexes = self._sampler.locate(samples)[1]
        by_length = np.argsort(self._lengths[indexes], kind="stable").reshape(-1, self.micro_batch_size)
        rows = Permutation(len(by_length), derive_key(self._seed, "bucket", window))(np.arange(len(by_length)))
        return samples[by_length[rows]], indexes[by_length[rows]]
