"""Streams of the images of `image_task`, as users would write them."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import IterableDataset

from raytrain_hpc import Config
from tests.data.samples import image_task


class PlainStream:
    """An iterable without a state. Its order in an epoch and its augmentation come from the generators."""

    def __init__(self, size: int = image_task.SIZE, **options: Any):
        self.images = image_task.Images(size, **options)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(len(self.images)))
        random.shuffle(order)
        for index in order:
            yield self.images[index]


class PlainIterable(PlainStream, IterableDataset[dict[str, Any]]):  # type: ignore[misc]
    """The same as torch's class, which a DataLoader needs."""


class StatefulStream(IterableDataset[dict[str, Any]]):
    """Part `rank` of `world_size`, dealt round-robin, with a state that holds the order of the epoch."""

    num_read = 0  # by this process

    def __init__(self, rank: int = 0, world_size: int = 1):
        self._images, self._part = image_task.Images(), (rank, world_size)
        self._epoch, self._next = 0, 0
        self._generator = np.random.default_rng(3)
        self._resume: Any = None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._next = 0
        if self._resume is not None:
            self._epoch, self._next = self._resume
            self._resume = None
        order = np.random.default_rng([7, self._epoch]).permutation(len(self._images))[self._part[0] :: self._part[1]]
        while self._next < len(order):
            self._next += 1
            StatefulStream.num_read += 1
            yield self._images[int(order[self._next - 1])]

    def state_dict(self) -> dict[str, Any]:
        return {
            "place": (self._epoch, self._next),
            "generator": self._generator.bit_generator.state,
            0: torch.tensor([self._epoch, self._next]),
            "bytes": bytes([self._next]),
        }

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert tuple(state[0].tolist()) == state["place"] and state["bytes"] == bytes([state["place"][1]])
        self._generator.bit_generator.state = state["generator"]
        self._resume = state["place"]


def deal_images(rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """A generator function: the images in order, dealt round-robin."""
    images = image_task.Images()
    for index in range(rank, len(images), world_size):
        yield images[index]


class InOrder:
    """Rows as a stream."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class OfThisProcess:
    """A stream of a length that differs between processes, which no dataset should have."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        images = image_task.Images()
        yield from (images[index] for index in range(4 + 4 * (torch.distributed.get_rank())))


class WithOpenFile(InOrder):
    """A stream whose state cannot be saved."""

    def __init__(self) -> None:
        super().__init__([image_task.Images()[index] for index in range(12)])

    def state_dict(self) -> dict[str, Any]:
        return {"file": io.BytesIO()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class WithLargeState(WithOpenFile):
    """A stream that keeps samples in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"samples": "x" * (2 << 20)}


def read_rows(rank: int, world_size: int) -> Iterator[dict[str, Any]]:
    """The validation rows, for a set that is a function; every rank asks for the whole of it."""
    assert (rank, world_size) == (0, 1)
    images = image_task.Images(11, 1, augment=False)
    return (images[index] for index in range(11))


def build_without_dropout(config: Config) -> nn.Module:
    model = image_task.Classifier()
    model.dropout.p = 0.0
    return model
