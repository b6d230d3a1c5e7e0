"""Iteration over a user's stream, epoch after epoch, with random bits that depend on the number of the item alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from raytrain_hpc.data.loader.sampler import derive_key
from raytrain_hpc.data.samples.dataset_form import find_form, is_loader
from raytrain_hpc.data.samples.loader_workers import start_workers_afresh
from raytrain_hpc.data.samples.sample_reader import seed_generators
from raytrain_hpc.data.samples.state_format import decode_state, encode_state
from raytrain_hpc.errors import DataError

END = object()  # of an epoch
_SHUFFLE_BUFFER = "BufferShuffledExamplesIterable"  # class of Hugging Face datasets; its buffer is not in its state


@dataclass(frozen=True)
class StreamSource:
    """A user's stream as a rank opens it. `name`: that of the argument, for messages.

    `part`: (rank, world size) of a function, (0, 1) for the whole stream. `is_worker`: this process is a worker, whose
    death others must see.
    """

    dataset: Any
    name: str = "dataset"
    part: tuple[int, int] = (0, 1)
    is_worker: bool = False

    @property
    def is_partitioned(self) -> bool:
        """Whether this is one of several parts. A function that gives the whole stream is read as an iterable is."""
        return self.part[1] > 1

    def open(self) -> Any:
        """Return the iterable. Raises DataError if the user's function returns something else."""
        if find_form(self.name, self.dataset) != "function":
            return self.dataset
        iterable = self.dataset(*self.part)
        if not hasattr(iterable, "__iter__"):
            raise DataError(
                f"{self.name}: the function returned {type(iterable).__name__}; return an iterable of samples or of "
                "batches"
            )
        return iterable


@dataclass(frozen=True)
class StreamPosition:
    """Position in a stream: the epoch, the items read before it, those read in the run, and the iterable's own state.

    An item is a sample, or a batch of a loader. `state`: text of `encode_state`; None if the iterable has none.
    """

    epoch: int = 0
    epoch_start: int = 0
    num_items: int = 0
    state: str | None = None


class ItemIterator:
    """Endless iterator over the items of a stream.

    Before each item is read, the generators of `random`, NumPy and torch (CPU) are seeded by `get_number` of its place,
    so that an item that is read again, or by another rank, has the same bits. Call under `restore_generators`.
    """

    def __init__(self, source: StreamSource, stream: Any, seed: int, name: str, get_number: Callable[[int], int]):
        self._source, self._stream, self._seed, self._name, self._get_number = source, stream, seed, name, get_number
        self._epoch, self._epoch_start, self._num_items = 0, 0, 0
        self._iterator: Iterator[Any] | None = None

    def seek(self, position: StreamPosition) -> None:
        """Continue at a position: in the state of the stream if it has one, otherwise at the start of the epoch."""
        self._epoch, self._epoch_start = position.epoch, position.epoch_start
        self._num_items, self._iterator = position.epoch_start, None
        if position.state is not None and hasattr(self._stream, "load_state_dict"):
            self._prepare_epoch()
            self._stream.load_state_dict(decode_state(position.state))
            self._num_items = position.num_items
            seed_generators(self._derive_key(self._epoch_start))  # a loader may read the epoch again by itself
            self._iterator = self._iterate()

    def read(self) -> Any:
        """Return the next item. Raises DataError if an epoch has none."""
        while (item := self.read_in_epoch()) is END:
            if self._num_items == self._epoch_start:
                raise DataError(
                    f"{self._source.name}: epoch {self._epoch} of {type(self._stream).__name__} is empty; its __iter__ "
                    "must begin anew each time"
                )
            self._epoch, self._epoch_start, self._iterator = self._epoch + 1, self._num_items, None
        return item

    def read_in_epoch(self) -> Any:
        """Return the next item, or END at the end of the epoch."""
        seed_generators(self._derive_key(self._num_items))
        if self._iterator is None:
            if hasattr(self._stream, "__next__") and self._num_items:  # a generator serves one epoch
                self._stream = self._source.open()
            self._prepare_epoch()
            self._iterator = self._iterate()
        item = next(self._iterator, END)
        self._num_items += item is not END
        return item

    @property
    def num_items(self) -> int:
        """Number of items read in the run."""
        return self._num_items

    def get_position(self) -> StreamPosition:
        """Return the position. Raises DataError if the state of the stream holds unsupported values."""
        state = encode_state(self._stream.state_dict()) if has_exact_state(self._stream) else None
        return StreamPosition(self._epoch, self._epoch_start, self._num_items, state)

    def _iterate(self) -> Iterator[Any]:
        has_workers = self._source.is_worker and is_loader(self._stream)
        with start_workers_afresh(self._stream) if has_workers else nullcontext():
            return iter(self._stream)

    def _prepare_epoch(self) -> None:
        """Tell the stream, and the parts of a loader, which epoch begins; seed the generators of a loader for it."""
        parts = [self._stream]
        if is_loader(self._stream):
            batch_sampler = getattr(self._stream, "batch_sampler", None)
            parts += [getattr(self._stream, name, None) for name in ("dataset", "sampler")]
            parts += [batch_sampler, getattr(batch_sampler, "sampler", None)]
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(self._epoch)
            generator = getattr(part, "generator", None) if is_loader(self._stream) else None
            if isinstance(generator, torch.Generator):
                generator.manual_seed(self._derive_key(self._epoch_start))

    def _derive_key(self, item: int) -> int:
        return derive_key(self._seed, self._name, self._get_number(item))


def has_exact_state(stream: Any) -> bool:
    """Return whether a stream has a state from which it continues with exactly the next item."""
    if not (hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")):
        return False
    return not _has_shuffle_buffer(getattr(stream, "dataset", stream) if is_loader(stream) else stream)


def _has_shuffle_buffer(part: Any) -> bool:
    """Return whether a Hugging Face stream shuffles with a buffer, whose content a resume would lose."""
    if type(part).__name__ == _SHUFFLE_BUFFER:
        return True
    if isinstance(part, list | tuple):
        return any(_has_shuffle_buffer(item) for item in part)
    is_stream = type(part).__module__ == "datasets.iterable_dataset"
    return is_stream and any(_has_shuffle_buffer(value) for value in vars(part).values())
