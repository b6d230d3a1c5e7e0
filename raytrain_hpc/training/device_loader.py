"""Loader of a rank's microbatches onto its device, prefetched by a thread.

For a CPU, prefetched microbatches stay in the compact form in which they were read, which keeps them in its cache.
Widening one when it is taken costs microseconds. For a GPU, the thread widens them and copies them to the device on a
stream of its own, overlapped with computation.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.dataset.token_shards import Ints
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import IGNORE_INDEX
from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.data.loader.stream import Block, Microbatch, Stream
from raytrain_hpc.errors import DataError
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.torch_device import get_device_module, is_accelerator
from raytrain_hpc.training.train_module import Batch

_MIN_PREFETCH_BLOCKS = 4  # of the prefetch limit, so that other blocks are ready while one is used


@dataclass
class _PrefetchedBatch:
    """A microbatch in host memory; for a GPU also as a batch, which is complete at `copy_event`."""

    microbatch: Microbatch
    batch: Batch | None = None
    copy_event: Any = None  # an Event of the device

    @property
    def samples(self) -> Ints:
        return self.microbatch.samples

    @property
    def nbytes(self) -> int:
        return (
            self.microbatch.nbytes if self.batch is None else sum(tensor.nbytes for tensor in list_tensors(self.batch))
        )


class DeviceLoader:
    """Training data of one rank. `microbatches`: the logical microbatches that it computes in each step."""

    def __init__(
        self, stream: Stream, batching: Batching, microbatches: range, device: torch.device, config: DataConfig
    ):
        self.stream, self._batching, self._microbatches, self._device = stream, batching, microbatches, device
        self._max_batches, self._max_bytes = config.prefetch_steps * len(microbatches), config.prefetch_mib << 20
        self._prefetcher: Prefetcher[Block | _PrefetchedBatch] | None = None
        self._remaining: Iterator[_PrefetchedBatch] = iter(())  # of the block that was taken last
        self._last_batch: Batch | None = None

    @contextmanager
    def prefetch(self, start_step: int, end_step: int) -> Iterator[None]:
        """Prefetch the steps [start_step, end_step) in a thread inside the context. Request them in order."""
        self._prefetcher = Prefetcher(
            self._read_blocks(
                range(start_step, end_step), self._microbatches, max(1, self._max_batches // _MIN_PREFETCH_BLOCKS)
            ),
            size=lambda item: item.nbytes,
            count=lambda item: len(item.samples) // self._batching.size,
            max_items=self._max_batches,
            max_bytes=self._max_bytes,
        )
        try:
            yield
        finally:
            self._prefetcher.close()
            self._prefetcher = self._last_batch = None
            self._remaining = iter(())

    def read(self, step: int, slot: int) -> Batch:
        """Return the microbatch of a slot of a step on the device.

        A slot beyond this rank's microbatches repeats the last one as padding. Raises any error of the reading thread,
        and DataError if the samples are not those of the slot.
        """
        if slot >= len(self._microbatches):
            if self._last_batch is None:
                self._last_batch = self._to_batch(self._read_one(step, self._microbatches[-1]))
            return replace(self._last_batch, is_padding=True)
        index = self._microbatches[slot]
        item = self._read_one(step, index) if self._prefetcher is None else self._take_next(self._prefetcher)
        sample, expected = int(item.microbatch.samples[0]), (step * self._batching.count + index) * self._batching.size
        if sample != expected:
            raise DataError(f"step {step}, microbatch {index}: read sample {sample}, expected {expected}")
        self._last_batch = self._to_batch(item)
        return self._last_batch

    def reread(self, step: int, slot: int) -> Batch:
        """Read the same microbatch again, without the prefetcher."""
        microbatch = self._microbatches[min(slot, len(self._microbatches) - 1)]
        return replace(self._to_batch(self._read_one(step, microbatch)), is_padding=slot >= len(self._microbatches))

    reads_any_microbatch = True

    def read_microbatch(self, step: int, microbatch: int) -> Batch:
        """Read a logical microbatch, of any rank, without the prefetcher."""
        return self._to_batch(self._read_one(step, microbatch))

    def _to_batch(self, prefetched: _PrefetchedBatch) -> Batch:
        if prefetched.batch is None:
            return move_to_device(prefetched.microbatch, self._device)
        if prefetched.copy_event is not None:
            current_stream = get_device_module(self._device).current_stream(self._device)
            current_stream.wait_event(prefetched.copy_event)
            for tensor in list_tensors(prefetched.batch):
                tensor.record_stream(current_stream)
        return prefetched.batch

    def _take_next(self, prefetcher: Prefetcher[Block | _PrefetchedBatch]) -> _PrefetchedBatch:
        while (prefetched := next(self._remaining, None)) is None:
            self._remaining = self._unpack(prefetcher.take())
        return prefetched

    def _read_one(self, step: int, microbatch: int) -> _PrefetchedBatch:
        return _PrefetchedBatch(self.stream.read_microbatch(step, microbatch))

    def _unpack(self, item: Block | _PrefetchedBatch) -> Iterator[_PrefetchedBatch]:
        return (
            iter((item,))
            if isinstance(item, _PrefetchedBatch)
            else map(_PrefetchedBatch, item.split_microbatches(self._batching.size))
        )

    def _read_blocks(
        self, steps: range, microbatches: range, max_batches: int
    ) -> Generator[Block | _PrefetchedBatch, None, None]:
        """Yield blocks of at most `max_batches` microbatches for a CPU, or single ones being copied to a GPU."""
        if not is_accelerator(self._device):
            yield from self.stream.iter_blocks(steps, microbatches, max_batches)
            return
        module = get_device_module(self._device)
        copy_stream = module.Stream(self._device)
        for microbatch in self.stream.iter_microbatches(steps, microbatches):
            with module.stream(copy_stream):
                batch = move_to_device(microbatch, self._device, pin_memory=True)
                yield _PrefetchedBatch(microbatch, batch, copy_stream.record_event())


def move_to_device(
    microbatch: Microbatch, device: torch.device, *, is_padding: bool = False, pin_memory: bool = False
) -> Batch:
    """Return a microbatch as tensors on a device. `pin_memory`: copy asynchronously from page-locked memory."""

    def to_device(array: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if pin_memory else tensor).to(device, non_blocking=True)

    documents, targets = microbatch.document_ids, microbatch.targets
    return Batch(
        to_device(microbatch.inputs),
        to_device(targets),
        to_device(microbatch.samples),
        None if documents is None else to_device(documents),
        int((targets != IGNORE_INDEX).sum()),
        is_padding,
    )


@dataclass
class TokenEvalBatches:
    """Batches of a validation split of tokens on the device."""

    eval_set: EvaluationSet
    device: torch.device

    def count_batches(self, first: int, limit: int) -> int:
        """Return how many of the `limit` batches from `first` on exist."""
        return min(limit, self.eval_set.num_batches - first)

    def get_batch(self, index: int, *, is_padding: bool) -> Batch:
        """Return a batch. `is_padding`: it has weight zero."""
        return move_to_device(self.eval_set.get_batch(index), self.device, is_padding=is_padding)


def list_tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch."""
    tensors = [batch.inputs, batch.targets, batch.samples]
    return tensors if batch.documents is None else [*tensors, batch.documents]
