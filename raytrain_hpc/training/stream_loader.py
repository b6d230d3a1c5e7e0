"""Loader of a rank's microbatches of a user's stream, and batches of validation sets that are streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raytrain_hpc.config.schema import AUTO, DataConfig
from raytrain_hpc.data.loader.sampler import Ints
from raytrain_hpc.data.samples.stream_reader import StepBatches, StreamReader, iter_steps_in_reader
from raytrain_hpc.data.samples.stream_source import StreamPosition
from raytrain_hpc.errors import DataError
from raytrain_hpc.torch_device import is_accelerator
from raytrain_hpc.training.sample_loader import to_batch
from raytrain_hpc.training.stream_state import StreamState
from raytrain_hpc.training.train_module import SampleBatch

_END: Any = object()


class StreamLoader:
    """Training data of one rank from a stream. `state`: takes the position after each step.

    `part`: (data-parallel rank, their number) if the stream is that rank's own, else (0, 1). `log`: prints a line for
    all ranks. `on_wait`: called while samples are read again, so that the rank counts as alive.
    """

    def __init__(
        self,
        reader: StreamReader,
        state: StreamState,
        part: tuple[int, int],
        device: torch.device,
        config: DataConfig,
        log: Callable[[str], None],
        on_wait: Callable[[], None],
    ):
        self.state, self._reader, self._part, self._device = state, reader, part, device
        auto = 1 if is_accelerator(device) else 0
        num_readers = auto if config.num_readers == AUTO else int(config.num_readers)
        self._has_reader_process = num_readers > 0 and not reader.yields_batches
        self._num_ahead, self._log, self._on_wait = config.prefetch_steps, log, on_wait
        self._steps: Iterator[StepBatches | None] = iter(())
        self._batches: StepBatches | None = None
        self._step = -1  # of `_batches`

    @contextmanager
    def prefetch(self, start_step: int, end_step: int) -> Iterator[None]:
        """Open the stream at `start_step`, and read ahead inside the context. Request the steps in order."""
        position = self._find_position(start_step)
        self._steps, self._step = self._reader.iter_steps(start_step, position), start_step - 1
        if self._has_reader_process and start_step + 1 < end_step:
            pin_memory = is_accelerator(self._device)
            ahead = iter_steps_in_reader(self._reader, start_step, position, self._num_ahead, pin_memory=pin_memory)
            self._steps = _chain_after_first(self._steps, ahead)
        try:
            yield
        finally:
            self._steps, self._batches = iter(()), None  # ends the reader

    def read(self, step: int, slot: int) -> SampleBatch:
        """Return the microbatch of a slot of a step on the device.

        A slot beyond this rank's microbatches repeats the last one as padding. Raises any error of the stream.
        """
        if step != self._step:
            self._batches, self._step = self._read_step(), self._step + 1
        if self._batches is None or step != self._step:
            raise DataError(f"dataset: step {step} was requested of a stream that is at step {self._step}")
        self.state.position = self._batches.position
        index = min(slot, len(self._batches.contents) - 1)
        batch = to_batch(self._batches.contents[index], self._batches.samples[index], self._device)
        return replace(batch, is_padding=slot >= len(self._batches.contents))

    def reread(self, step: int, slot: int) -> SampleBatch:
        """Return the same microbatch again: those of the current step are kept."""
        return self.read(step, slot)

    reads_any_microbatch = False

    def read_microbatch(self, step: int, microbatch: int) -> SampleBatch:
        """Return a logical microbatch of this rank."""
        return self.read(step, microbatch - self._reader.first_microbatch)

    def _read_step(self) -> StepBatches:
        while (batches := next(self._steps)) is None:
            self._on_wait()
        return batches

    def _find_position(self, start_step: int) -> StreamPosition:
        """Return the position to continue from at `start_step`, and log how many samples are read again."""
        positions, (rank, count) = self.state.open(), self._part
        position = positions[rank] if len(positions) == count else StreamPosition()
        self.state.position = position
        num_replayed = self._reader.count_replayed(start_step, position)
        unit = "batches" if self._reader.yields_batches else "samples"
        if positions and len(positions) != count:
            self._log(
                f"data    {count} ranks instead of {len(positions)} read parts of the dataset: each opens its part "
                f"anew and skips {num_replayed} {unit}; exact only if the parts are dealt round-robin"
            )
        elif num_replayed:
            self._log(f"data    {num_replayed} {unit} of the dataset are read again to resume at step {start_step}")
        return position


def _chain_after_first(
    here: Iterator[StepBatches | None], ahead: Iterator[StepBatches | None]
) -> Iterator[StepBatches | None]:
    """Yield the first step of `here`, and from the second step on those of `ahead`, which has both."""
    while (batches := next(here)) is None:
        yield None
    yield batches
    while next(ahead) is None:
        yield None
    yield from ahead


class StreamEvalBatches:
    """Batches of a validation set that is a stream, which each evaluation reads from its beginning.

    Every rank reads the whole set and keeps its own batches. `max_samples`: of the first samples; 0: all.
    """

    def __init__(self, reader: StreamReader, name: str, max_samples: int, device: torch.device):
        self._reader, self._name, self._max_samples, self._device = reader, name, max_samples, device
        self._batches: Iterator[tuple[Any, Ints] | None] = iter(())
        self._kept: dict[int, tuple[Any, Ints]] = {}

    def count_batches(self, first: int, limit: int) -> int:
        """Read on up to `limit` batches, and return how many there are. Raises DataError if the set is empty."""
        if first == 0:
            self._batches = self._reader.iter_epoch(self._max_samples)
            self._kept = {}
        self._kept = {index: batch for index, batch in self._kept.items() if index == 0}  # for padding
        count = 0
        while count < limit and (batch := next(self._batches, _END)) is not _END:
            if batch is not None:
                self._kept[first + count] = batch
            count += 1
        if not first + count:
            raise DataError(f"{self._name}: it is empty; its __iter__ must begin anew each time")
        return count

    def get_batch(self, index: int, *, is_padding: bool) -> SampleBatch:
        """Return a batch on the device. `is_padding`: it has weight zero."""
        return replace(to_batch(*self._kept[index], self._device), is_padding=is_padding)
