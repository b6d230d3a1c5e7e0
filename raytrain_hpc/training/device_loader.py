"""A rank's microbatches on its device: read ahead by a thread while it trains.

Ahead they are kept as compact as they were read, and widened when they are taken, which costs a CPU's loop microseconds
and keeps what is read ahead in its cache; what goes to a GPU is widened by the thread, and copied behind its work.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.dataset.token_shards import Ints
from raytrain_hpc.data.loader.packing import IGNORE_INDEX
from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.data.loader.stream import Block, Microbatch, Stream
from raytrain_hpc.errors import DataError
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.training.train_module import Batch

_MIN_PREFETCH_BLOCKS = (
    4  # of what may be ahead, at least so many are handed over one by one: else nothing is ahead while one is used
)


@dataclass
class _PrefetchedBatch:
    """A microbatch in host memory, as compact as it was read, or as a batch on its way to a GPU until `copied`."""

    microbatch: Microbatch
    batch: Batch | None = None
    copy_event: torch.cuda.Event | None = None

    @property
    def samples(self) -> Ints:
        return self.microbatch.samples

    @property
    def nbytes(self) -> int:
        return (
            self.microbatch.nbytes if self.batch is None else sum(tensor.nbytes for tensor in list_tensors(self.batch))
        )


class DeviceLoader:
    """What one rank trains on. `share`: its logical microbatches of every step."""

    def __init__(
        self, stream: Stream, batching: Batching, microbatches: range, device: torch.device, config: DataConfig
    ):
        self.stream, self._batching, self._microbatches, self._device = stream, batching, microbatches, device
        self._max_batches, self._max_bytes = config.ahead_steps * len(microbatches), config.ahead_mib << 20
        self._prefetcher: Prefetcher[Block | _PrefetchedBatch] | None = None
        self._remaining: Iterator[_PrefetchedBatch] = iter(())  # the rest of what was taken from it last
        self._last_batch: Batch | None = None

    @contextmanager
    def prefetch(self, start_step: int, end_step: int) -> Iterator[None]:
        """Inside, a thread reads the steps [first, stop) ahead; they must be asked for in order."""
        self._prefetcher = Prefetcher(
            self._read_blocks(
                range(start_step, end_step), self._microbatches, max(1, self._max_batches // _MIN_PREFETCH_BLOCKS)
            ),
            size=lambda one: one.nbytes,
            count=lambda one: len(one.samples) // self._batching.size,
            max_items=self._max_batches,
            max_bytes=self._max_bytes,
        )
        try:
            yield
        finally:
            self._prefetcher.close()
            self._prefetcher = self._last_batch = None
            self._remaining = iter(())

    def next_batch(self, step: int, slot: int) -> Batch:
        """The microbatch of a slot of a step; a slot behind the share repeats the last one, as a spare one.

        Raises what reading it raised, and DataError where it holds other samples.
        """
        if slot >= len(self._microbatches):
            if self._last_batch is None:
                self._last_batch = self._to_batch(self._read_one(step, self._microbatches[-1]))
            return replace(self._last_batch, is_padding=True)
        v = self._microbatches[slot]
        ready = self._read_one(step, v) if self._prefetcher is None else self._take_next(self._prefetcher)
        first, due = int(ready.microbatch.samples[0]), (step * self._batching.count + v) * self._batching.size
        if first != due:
            raise DataError(f"step {step}, microbatch {v}: sample {first} was read where {due} is due")
        self._last_batch = self._to_batch(ready)
        return self._last_batch

    def reread(self, step: int, slot: int) -> Batch:
        """The same microbatch once more, read here and now."""
        v = self._microbatches[min(slot, len(self._microbatches) - 1)]
        return replace(self._to_batch(self._read_one(step, v)), is_padding=slot >= len(self._microbatches))

    def _to_batch(self, prefetched: _PrefetchedBatch) -> Batch:
        if prefetched.batch is None:
            return move_to_device(prefetched.microbatch, self._device)
        if prefetched.copy_event is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(prefetched.copy_event)
            for tensor in list_tensors(prefetched.batch):
                tensor.record_stream(now)
        return prefetched.batch

    def _take_next(self, prefetcher: Prefetcher[Block | _PrefetchedBatch]) -> _PrefetchedBatch:
        while (ready := next(self._remaining, None)) is None:
            self._remaining = self._unpack(prefetcher.take())
        return ready

    def _read_one(self, step: int, microbatch: int) -> _PrefetchedBatch:
        return next(self._unpack(next(self._read_blocks(range(step, step + 1), range(microbatch, microbatch + 1), 1))))

    def _unpack(self, read: Block | _PrefetchedBatch) -> Iterator[_PrefetchedBatch]:
        return (
            iter((read,))
            if isinstance(read, _PrefetchedBatch)
            else map(_PrefetchedBatch, read.split_microbatches(self._batching.size))
        )

    def _read_blocks(
        self, steps: range, microbatches: range, max_batches: int
    ) -> Generator[Block | _PrefetchedBatch, None, None]:
        """At most `most` microbatches together for a CPU, and one by one on their way to a GPU."""
        if self._device.type != "cuda":
            yield from self.stream.iter_blocks(steps, microbatches, max_batches)
            return
        copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for microbatch in self.stream.iter_microbatches(steps, microbatches):
            with torch.cuda.stream(copies):
                batch = move_to_device(microbatch, self._device, pin_memory=True)
                yield _PrefetchedBatch(microbatch, batch, copies.record_event())


def move_to_device(
    microbatch: Microbatch, device: torch.device, *, is_padding: bool = False, pin_memory: bool = False
) -> Batch:
    """A microbatch as tensors; `pinned` goes through page-locked memory, so that the copy runs by itself."""

    def moved(array: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if pin_memory else tensor).to(device, non_blocking=True)

    documents, targets = microbatch.document_ids, microbatch.targets
    return Batch(
        moved(microbatch.inputs),
        moved(targets),
        moved(microbatch.samples),
        None if documents is None else moved(documents),
        int((targets != IGNORE_INDEX).sum()),
        is_padding,
    )


def list_tensors(batch: Batch) -> list[Tensor]:
    """What a batch holds on its device."""
    held = [batch.inputs, batch.targets, batch.samples]
    return held if batch.documents is None else [*held, batch.documents]
