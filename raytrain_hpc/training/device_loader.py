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
from raytrain_hpc.data.loader.packing import IGNORED
from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.data.loader.stream import Block, Microbatch, Stream
from raytrain_hpc.errors import DataError
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.training.train_module import Batch

_PARTS = 4  # of what may be ahead, at least so many are handed over one by one: else nothing is ahead while one is used


@dataclass
class _Ready:
    """A microbatch in host memory, as compact as it was read, or as a batch on its way to a GPU until `copied`."""

    read: Microbatch
    batch: Batch | None = None
    copied: torch.cuda.Event | None = None

    @property
    def samples(self) -> Ints:
        return self.read.samples

    @property
    def nbytes(self) -> int:
        return self.read.nbytes if self.batch is None else sum(tensor.nbytes for tensor in tensors(self.batch))


class Feed:
    """What one rank trains on. `share`: its logical microbatches of every step."""

    def __init__(self, stream: Stream, batching: Batching, share: range, device: torch.device, data: DataConfig):
        self.stream, self._batching, self._share, self._device = stream, batching, share, device
        self._max_batches, self._max_bytes = data.ahead_steps * len(share), data.ahead_mib << 20
        self._ahead: Prefetcher[Block | _Ready] | None = None
        self._here: Iterator[_Ready] = iter(())  # the rest of what was taken from it last
        self._last: Batch | None = None

    @contextmanager
    def reading(self, first: int, stop: int) -> Iterator[None]:
        """Inside, a thread reads the steps [first, stop) ahead; they must be asked for in order."""
        self._ahead = Prefetcher(
            self._read(range(first, stop), self._share, max(1, self._max_batches // _PARTS)),
            size=lambda one: one.nbytes,
            count=lambda one: len(one.samples) // self._batching.size,
            max_items=self._max_batches,
            max_bytes=self._max_bytes,
        )
        try:
            yield
        finally:
            self._ahead.close()
            self._ahead = self._last = None
            self._here = iter(())

    def batch(self, step: int, slot: int) -> Batch:
        """The microbatch of a slot of a step; a slot behind the share repeats the last one, as a spare one.

        Raises what reading it raised, and DataError where it holds other samples.
        """
        if slot >= len(self._share):
            if self._last is None:
                self._last = self._arrived(self._read_now(step, self._share[-1]))
            return replace(self._last, spare=True)
        v = self._share[slot]
        ready = self._read_now(step, v) if self._ahead is None else self._next(self._ahead)
        first, due = int(ready.read.samples[0]), (step * self._batching.count + v) * self._batching.size
        if first != due:
            raise DataError(f"step {step}, microbatch {v}: sample {first} was read where {due} is due")
        self._last = self._arrived(ready)
        return self._last

    def again(self, step: int, slot: int) -> Batch:
        """The same microbatch once more, read here and now."""
        v = self._share[min(slot, len(self._share) - 1)]
        return replace(self._arrived(self._read_now(step, v)), spare=slot >= len(self._share))

    def _arrived(self, ready: _Ready) -> Batch:
        if ready.batch is None:
            return on_device(ready.read, self._device)
        if ready.copied is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(ready.copied)
            for tensor in tensors(ready.batch):
                tensor.record_stream(now)
        return ready.batch

    def _next(self, ahead: Prefetcher[Block | _Ready]) -> _Ready:
        while (ready := next(self._here, None)) is None:
            self._here = self._each(ahead.take())
        return ready

    def _read_now(self, step: int, v: int) -> _Ready:
        return next(self._each(next(self._read(range(step, step + 1), range(v, v + 1), 1))))

    def _each(self, read: Block | _Ready) -> Iterator[_Ready]:
        return iter((read,)) if isinstance(read, _Ready) else map(_Ready, read.microbatches(self._batching.size))

    def _read(self, steps: range, share: range, most: int) -> Generator[Block | _Ready, None, None]:
        """At most `most` microbatches together for a CPU, and one by one on their way to a GPU."""
        if self._device.type != "cuda":
            yield from self.stream.blocks(steps, share, most)
            return
        copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for microbatch in self.stream.microbatches(steps, share):
            with torch.cuda.stream(copies):
                batch = on_device(microbatch, self._device, pinned=True)
                yield _Ready(microbatch, batch, copies.record_event())


def on_device(microbatch: Microbatch, device: torch.device, *, spare: bool = False, pinned: bool = False) -> Batch:
    """A microbatch as tensors; `pinned` goes through page-locked memory, so that the copy runs by itself."""

    def moved(array: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)

    documents, targets = microbatch.documents, microbatch.targets
    return Batch(
        moved(microbatch.inputs),
        moved(targets),
        moved(microbatch.samples),
        None if documents is None else moved(documents),
        int((targets != IGNORED).sum()),
        spare,
    )


def tensors(batch: Batch) -> list[Tensor]:
    """What a batch holds on its device."""
    held = [batch.inputs, batch.targets, batch.samples]
    return held if batch.documents is None else [*held, batch.documents]
