"""A rank's microbatches on its device: read ahead by a thread while it trains."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain_hpc.config import DataConfig
from raytrain_hpc.data.prefetch import Prefetcher
from raytrain_hpc.data.stream import Microbatch, Stream
from raytrain_hpc.errors import DataError
from raytrain_hpc.plan.layout import Batching
from raytrain_hpc.worker.task import Batch


@dataclass
class _Ready:
    """A batch on the device, or on its way there until `copied`."""

    first_sample: int
    batch: Batch
    copied: torch.cuda.Event | None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in tensors(self.batch))


class Feed:
    """What one rank trains on. `share`: its logical microbatches of every step."""

    def __init__(self, stream: Stream, batching: Batching, share: range, device: torch.device, data: DataConfig):
        self.stream, self._batching, self._share, self._device = stream, batching, share, device
        self._max_batches, self._max_bytes = data.ahead_steps * len(share), data.ahead_mib << 20
        self._ahead: Prefetcher[_Ready] | None = None
        self._last: Batch | None = None

    @contextmanager
    def reading(self, first: int, stop: int) -> Iterator[None]:
        """Inside, a thread reads the steps [first, stop) ahead; they must be asked for in order."""
        ready = self._ready(range(first, stop))
        self._ahead = Prefetcher(
            ready, size=lambda one: one.bytes, max_items=self._max_batches, max_bytes=self._max_bytes
        )
        try:
            yield
        finally:
            self._ahead.close()
            self._ahead = self._last = None

    def batch(self, step: int, slot: int) -> Batch:
        """The microbatch of a slot of a step; a slot behind the share repeats the last one, as a spare one.

        Raises what reading it raised, and DataError where it holds other samples.
        """
        if slot >= len(self._share):
            if self._last is None:
                self._last = self._read_now(step, self._share[-1]).batch
            return replace(self._last, spare=True)
        v = self._share[slot]
        ready = self._read_now(step, v) if self._ahead is None else self._ahead.take()
        due = (step * self._batching.count + v) * self._batching.size
        if ready.first_sample != due:
            raise DataError(f"step {step}, microbatch {v}: sample {ready.first_sample} was read where {due} is due")
        if ready.copied is not None:
            now = torch.cuda.current_stream(self._device)
            now.wait_event(ready.copied)
            for tensor in tensors(ready.batch):
                tensor.record_stream(now)
        self._last = ready.batch
        return ready.batch

    def again(self, step: int, slot: int) -> Batch:
        """The same microbatch once more, read here and now."""
        v = self._share[min(slot, len(self._share) - 1)]
        return replace(self._read_now(step, v).batch, spare=slot >= len(self._share))

    def _read_now(self, step: int, v: int) -> _Ready:
        return next(self._ready(range(step, step + 1), range(v, v + 1)))

    def _ready(self, steps: range, share: range | None = None) -> Generator[_Ready, None, None]:
        copies = None
        if self._device.type == "cuda":
            copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        for microbatch in self.stream.microbatches(steps, self._share if share is None else share):
            first = int(microbatch.samples[0])
            if copies is None:
                yield _Ready(first, on_device(microbatch, self._device), None)
                continue
            with torch.cuda.stream(copies):
                batch = on_device(microbatch, self._device, pinned=True)
                yield _Ready(first, batch, copies.record_event())


def on_device(microbatch: Microbatch, device: torch.device, *, spare: bool = False, pinned: bool = False) -> Batch:
    """A microbatch as tensors; `pinned` goes through page-locked memory, so that the copy runs by itself."""

    def moved(array: npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.pin_memory() if pinned else tensor).to(device, non_blocking=True)

    documents = None if microbatch.documents is None else moved(microbatch.documents)
    inputs, targets, samples = (moved(part) for part in (microbatch.inputs, microbatch.targets, microbatch.samples))
    return Batch(inputs, targets, samples, documents, microbatch.valid_tokens, spare)


def tensors(batch: Batch) -> list[Tensor]:
    """What a batch holds on its device."""
    held = [batch.inputs, batch.targets, batch.samples]
    return held if batch.documents is None else [*held, batch.documents]
