"""Loader of a rank's microbatches of a user's dataset, and batches of its validation sets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raytrain_hpc.config.schema import AUTO, DataConfig
from raytrain_hpc.data.loader.sampler import Ints
from raytrain_hpc.data.samples.sample_order import SampleOrder
from raytrain_hpc.data.samples.sample_reader import SampleReader, iter_batches_in_readers
from raytrain_hpc.torch_device import is_accelerator
from raytrain_hpc.training.train_module import SampleBatch

_AUTO_READERS_OF_GPU = 2


class SampleLoader:
    """Training data of one rank. `microbatches`: the logical microbatches that it computes in each step.

    Batches are read by `data.num_readers` processes ahead of the steps. Until these have started, and without readers,
    this process reads them: the content is the same.
    """

    def __init__(
        self, reader: SampleReader, order: SampleOrder, microbatches: range, device: torch.device, config: DataConfig
    ):
        self._reader, self._order, self._microbatches, self._device = reader, order, microbatches, device
        auto = _AUTO_READERS_OF_GPU if is_accelerator(device) else 0
        self._num_readers = auto if config.num_readers == AUTO else int(config.num_readers)
        self._num_ahead = config.prefetch_steps * len(microbatches)
        self._ahead: Iterator[Any] | None = None
        self._first_step_ahead = 0
        self._last_batch: SampleBatch | None = None

    @contextmanager
    def prefetch(self, start_step: int, end_step: int) -> Iterator[None]:
        """Read ahead inside the context, from the second step on. Request microbatches in order."""
        if self._num_readers and start_step + 1 < end_step:
            self._first_step_ahead = start_step + 1
            steps = range(start_step + 1, end_step)
            keys = (self._order.locate(step, microbatch) for step in steps for microbatch in self._microbatches)
            pin_memory = is_accelerator(self._device)
            self._ahead = iter_batches_in_readers(
                self._reader, keys, self._num_readers, self._num_ahead, pin_memory=pin_memory
            )
        try:
            yield
        finally:
            self._ahead = self._last_batch = None  # ends the readers

    def read(self, step: int, slot: int) -> SampleBatch:
        """Return the microbatch of a slot of a step on the device.

        A slot beyond this rank's microbatches repeats the last one as padding. Raises any error of the dataset.
        """
        if slot >= len(self._microbatches):
            last_batch = self._last_batch or self._read_here(step, self._microbatches[-1])
            return replace(last_batch, is_padding=True)
        if self._ahead is None or step < self._first_step_ahead:
            self._last_batch = self._read_here(step, self._microbatches[slot])
        else:
            samples, _ = self._order.locate(step, self._microbatches[slot])
            self._last_batch = to_batch(next(self._ahead), samples, self._device)
        return self._last_batch

    def reread(self, step: int, slot: int) -> SampleBatch:
        """Read the same microbatch again, in this process."""
        batch = self._read_here(step, self._microbatches[min(slot, len(self._microbatches) - 1)])
        return replace(batch, is_padding=slot >= len(self._microbatches))

    reads_any_microbatch = True

    def read_microbatch(self, step: int, microbatch: int) -> SampleBatch:
        """Read a logical microbatch, of any rank, in this process."""
        return self._read_here(step, microbatch)

    def _read_here(self, step: int, microbatch: int) -> SampleBatch:
        samples, indexes = self._order.locate(step, microbatch)
        return to_batch(self._reader.read(samples, indexes), samples, self._device)


@dataclass
class SampleEvalBatches:
    """Batches of a validation set in order; at most `max_samples` of its samples, spread evenly; 0: all."""

    reader: SampleReader
    batch_size: int
    max_samples: int
    device: torch.device

    def count_batches(self, first: int, limit: int) -> int:
        """Return how many of the `limit` batches from `first` on exist; the last one can be smaller."""
        return min(limit, -(-self._num_samples // self.batch_size) - first)

    @property
    def _num_samples(self) -> int:
        return min(self.max_samples, len(self.reader)) if self.max_samples else len(self.reader)

    def get_batch(self, index: int, *, is_padding: bool) -> SampleBatch:
        """Return a batch on the device. `is_padding`: it has weight zero."""
        rows = np.arange(index * self.batch_size, min((index + 1) * self.batch_size, self._num_samples))
        indexes = rows * len(self.reader) // self._num_samples
        return replace(to_batch(self.reader.read(indexes, indexes), indexes, self.device), is_padding=is_padding)


def to_batch(content: Any, samples: Ints, device: torch.device) -> SampleBatch:
    """Return a batch on a device. `samples`: their numbers, int64[n]."""
    return SampleBatch(move_content(content, device), torch.from_numpy(samples))


def move_content(content: Any, device: torch.device) -> Any:
    """Return nested dicts, lists and tuples with their tensors moved to a device; other values as they are."""
    if isinstance(content, Tensor):
        return content.to(device, non_blocking=True)
    if isinstance(content, Mapping):
        return {key: move_content(value, device) for key, value in content.items()}
    if isinstance(content, list | tuple):
        items = [move_content(item, device) for item in content]
        return type(content)(*items) if hasattr(content, "_fields") else type(content)(items)
    return content
