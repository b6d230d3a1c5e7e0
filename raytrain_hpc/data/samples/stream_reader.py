"""Reading of a user's stream, step by step: a rank's microbatches of a step, and the position after it."""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from raytrain_hpc.data.loader.sampler import Ints, derive_key
from raytrain_hpc.data.samples.dataset_form import get_loader_batch_size, is_loader
from raytrain_hpc.data.samples.sample_dataset import CollateFunction
from raytrain_hpc.data.samples.sample_reader import (
    exit_with_parent,
    make_reader_context,
    restore_generators,
    seed_generators,
)
from raytrain_hpc.data.samples.stream_source import END, ItemIterator, StreamPosition, StreamSource
from raytrain_hpc.errors import RaytrainError
from raytrain_hpc.ray_private import pickle_by_value

_PROGRESS_INTERVAL_S = 1.0


class StepBatches(NamedTuple):
    """The batches of a rank in one step, their sample numbers int64[n], and the position of the stream after it."""

    contents: list[Any]
    samples: list[Ints]
    position: StreamPosition


class StreamReader:
    """Reader of the logical `microbatches` of each step from a stream.

    `batching`: (V, b), microbatches per step and samples per microbatch. In a stream that all ranks share, the k-th
    item of the run belongs to the same logical microbatch on every rank: each reads all items and keeps its own. A
    stream of the rank alone has its microbatches only.
    """

    def __init__(
        self,
        source: StreamSource,
        collate: CollateFunction | None,
        seed: int,
        batching: tuple[int, int],
        microbatches: range,
        name: str = "train",
    ):
        self._source, self._collate, self._seed, self._name = source, collate, seed, name
        self._batching, self._microbatches = batching, microbatches
        self._stream: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a reader process, which opens the stream itself. See `SampleReader`."""
        user_parts = pickle_by_value((self._source, self._collate))
        return {**self.__dict__, "_source": user_parts, "_collate": None, "_stream": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the reader."""
        self.__dict__.update(state)
        self._source, self._collate = pickle.loads(state["_source"])

    @cached_property
    def yields_batches(self) -> bool:
        """Whether an item of the stream is a finished batch."""
        return is_loader(self._open())

    @cached_property
    def batch_size(self) -> int | None:
        """Number of samples in the finished batches of the stream, if it knows."""
        return get_loader_batch_size(self._open())

    @property
    def first_microbatch(self) -> int:
        """The first logical microbatch of this rank."""
        return self._microbatches.start

    def count_items(self, step: int) -> int:
        """Return the number of items that this rank has read after `step` steps."""
        return step * len(self._list_read_microbatches()) * self._items_per_microbatch

    def count_replayed(self, step: int, position: StreamPosition) -> int:
        """Return the number of items that are read again and discarded before `step`."""
        begin = position.epoch_start if position.state is None else position.num_items
        return self.count_items(step) - begin

    def iter_steps(self, step: int, position: StreamPosition) -> Iterator[StepBatches | None]:
        """Yield the batches of `step` and of each later step. None: items before `step` are still being read again.

        Generators of this process keep their state.
        """
        items = self._make_iterator()
        with restore_generators():
            items.seek(position)
        while items.num_items < self.count_items(step):
            self._skip(items, self.count_items(step))
            yield None
        while True:
            with restore_generators():
                batches = self._read_step(items, step)
            yield batches
            step += 1

    def iter_epoch(self, max_samples: int) -> Iterator[tuple[Any, Ints] | None]:
        """Yield the batches of the first epoch with their sample numbers int64[n]; the last one can be smaller.

        `max_samples`: end with the batch that holds the last of that many samples; 0: read all. None stands for a batch
        that is neither the first nor one of this rank's microbatches, modulo V.
        """
        items, index = self._make_iterator(), 0
        count, size = self._items_per_microbatch, self._batching[1]
        max_items = -(-max_samples * count // size) if max_samples else sys.maxsize
        while True:
            with restore_generators():
                rows: list[Any] = []
                while len(rows) < count and items.num_items < max_items:
                    if (item := items.read_in_epoch()) is END:
                        break
                    rows.append(item)
                if not rows:
                    return
                is_kept = index == 0 or index % self._batching[0] in self._microbatches
                content = self._form_batch(rows, index) if is_kept else None
            samples = index * size + np.arange(self._count_samples(rows, content), dtype=np.int64)
            yield (content, samples) if is_kept else None
            if len(rows) < count:  # a further read would begin another epoch
                return
            index += 1

    def _skip(self, items: ItemIterator, target: int) -> None:
        """Read items again for about a second."""
        deadline = time.monotonic() + _PROGRESS_INTERVAL_S
        with restore_generators():
            while items.num_items < target and time.monotonic() < deadline:
                items.read()

    def _read_step(self, items: ItemIterator, step: int) -> StepBatches:
        contents, samples = [], []
        count, size = self._batching
        for microbatch in self._list_read_microbatches():
            rows = [items.read() for _ in range(self._items_per_microbatch)]
            if microbatch in self._microbatches:
                number = step * count + microbatch
                contents.append(self._form_batch(rows, number))
                num_samples = self._count_samples(rows, contents[-1])
                samples.append(number * size + np.arange(num_samples, dtype=np.int64))
        return StepBatches(contents, samples, items.get_position())

    def _form_batch(self, rows: list[Any], number: int) -> Any:
        """Return the content of microbatch `number` of the run."""
        if self.yields_batches:
            return rows[0]
        seed_generators(derive_key(self._seed, f"{self._name} collate", number))
        return (self._collate or default_collate)(rows)

    def _count_samples(self, rows: list[Any], content: Any) -> int:
        return count_rows(content, self._batching[1]) if self.yields_batches else len(rows)

    def _open(self) -> Any:
        if self._stream is None:
            self._stream = self._source.open()
        return self._stream

    def _make_iterator(self) -> ItemIterator:
        stream = self._open()
        if hasattr(stream, "__next__"):  # a generator serves one epoch
            self._stream = None
        return ItemIterator(self._source, stream, self._seed, self._name, self._get_number)

    @property
    def _items_per_microbatch(self) -> int:
        return 1 if self.yields_batches else self._batching[1]

    def _list_read_microbatches(self) -> range:
        """Return the microbatches of a step whose items this rank reads."""
        return self._microbatches if self._source.is_partitioned else range(self._batching[0])

    def _get_number(self, index: int) -> int:
        """Return the number, over all ranks, of the item that this rank reads at a place of its stream."""
        microbatches, count = self._list_read_microbatches(), self._items_per_microbatch
        step, item = divmod(index, len(microbatches) * count)
        return (step * self._batching[0] + microbatches.start) * count + item


def count_rows(content: Any, batch_size: int) -> int:
    """Return the number of samples in a finished batch, which is smaller than `batch_size` at the end of an epoch.

    It is the size of dimension 0 if all tensors and arrays agree on one below `batch_size`, else `batch_size`.
    """
    sizes = set(_iter_sizes(content))
    return min(batch_size, *sizes) if len(sizes) == 1 else batch_size


def _iter_sizes(content: Any) -> Iterator[int]:
    if isinstance(content, torch.Tensor | np.ndarray):
        if content.ndim:
            yield len(content)
    elif isinstance(content, Mapping):
        for value in content.values():
            yield from _iter_sizes(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _iter_sizes(value)


class _StepsInReader(IterableDataset[Any]):
    """The steps of a stream, for a reader process. A RaytrainError is yielded, to be raised by the rank."""

    def __init__(self, reader: StreamReader, step: int, position: StreamPosition):
        self._reader, self._step, self._position = reader, step, position

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._reader.iter_steps(self._step, self._position)
        except RaytrainError as error:
            yield error


def iter_steps_in_reader(
    reader: StreamReader, step: int, position: StreamPosition, num_ahead: int, *, pin_memory: bool
) -> Iterator[StepBatches | None]:
    """Start a process that reads `num_ahead` steps ahead, and return the steps. An error of the reader is raised.

    The process is forked as those of `iter_batches_in_readers` are.
    """
    loader: DataLoader[Any] = DataLoader(
        _StepsInReader(reader, step, position),
        batch_size=None,
        collate_fn=_return_unchanged,
        num_workers=1,
        prefetch_factor=num_ahead,
        pin_memory=pin_memory,
        worker_init_fn=exit_with_parent,
        multiprocessing_context=make_reader_context(),
        generator=torch.Generator(),
    )
    return _raise_errors(iter(loader))


def _raise_errors(steps: Iterator[Any]) -> Iterator[StepBatches | None]:
    for batches in steps:
        if isinstance(batches, RaytrainError):
            raise batches
        yield batches


def _return_unchanged(batches: Any) -> Any:
    """Return what the reader yields, as it is."""
    return batches
