"""Reading of samples, in this process or in reader processes, with random bits that depend on the sample alone."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from typing import Any

import numpy as np
import torch

from raytrain_hpc.data.loader.sampler import Ints, derive_key
from raytrain_hpc.data.samples.sample_dataset import CollateFunction
from raytrain_hpc.ray_private import pickle_by_value


class SampleReader:
    """Reader of batches of a map-style dataset. `name`: keys the random bits, which differ between datasets.

    While a sample is read, the generators of `random`, NumPy and torch (CPU) are seeded by (seed, number of the sample
    in the run): augmentation is random, differs between epochs, and is the same in any process.
    """

    def __init__(self, dataset: Any, collate: CollateFunction | None, seed: int, name: str = "train"):
        self._dataset, self._collate, self._seed, self._name = dataset, collate, seed, name

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a reader process. Classes of a script reach it by value, as they reach Ray's workers."""
        user_parts = pickle_by_value((self._dataset, self._collate))
        return {"seed": self._seed, "name": self._name, "user_parts": user_parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the reader."""
        self._dataset, self._collate = pickle.loads(state["user_parts"])
        self._seed, self._name = state["seed"], state["name"]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._dataset)

    def read(self, samples: Ints, indexes: Ints) -> Any:
        """Return the batch of the samples at `indexes`. Generators of this process keep their state."""
        with restore_generators():
            return self._read(samples, indexes)

    def __getitems__(self, keys: Sequence[tuple[Ints, Ints]]) -> list[Any]:
        """Return batches for torch's DataLoader, which calls this in a reader process."""
        return [self._read(samples, indexes) for samples, indexes in keys]

    def _read(self, samples: Ints, indexes: Ints) -> Any:
        rows = []
        for sample, index in zip(samples.tolist(), indexes.tolist(), strict=True):
            seed_generators(derive_key(self._seed, self._name, sample))
            rows.append(self._dataset[index])
        if self._collate is not None:
            return self._collate(rows)
        from torch.utils.data import default_collate

        return default_collate(rows)


def seed_generators(key: int) -> None:
    """Seed the generators of `random`, NumPy and torch (CPU)."""
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.default_generator.manual_seed(key)


@contextmanager
def restore_generators() -> Iterator[None]:
    """Restore the generators of this process at the end of the context: the model's dropout draws from them."""
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])


def iter_batches_in_readers(
    reader: SampleReader, keys: Sequence[tuple[Ints, Ints]] | Any, num_readers: int, num_ahead: int, *, pin_memory: bool
) -> Iterator[Any]:
    """Start processes of torch's DataLoader that read ahead, and return the batches of `keys`. Raises their errors.

    The processes are forked from a server that has no sockets and threads of this one: a forked copy of this process
    would keep its connections open after its death, and hide it from its peers.
    """
    from torch.utils.data import DataLoader

    loader: DataLoader[Any] = DataLoader(
        reader,  # type: ignore[arg-type]
        batch_sampler=([key] for key in keys),  # type: ignore[arg-type]
        collate_fn=_unpack,
        num_workers=num_readers,
        prefetch_factor=max(1, num_ahead // num_readers),
        pin_memory=pin_memory,
        worker_init_fn=exit_with_parent,
        multiprocessing_context=make_reader_context(),
        generator=torch.Generator(),  # the default one belongs to the model
    )
    return iter(loader)


def make_reader_context() -> ForkServerContext:
    """Return the context in which reader processes start: from a server that has imported torch, to save seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch.utils.data", "raytrain_hpc.data.samples.stream_reader"])
    return context


def exit_with_parent(worker_id: int) -> None:
    """End this worker process of a DataLoader when the process that started it has died. `worker_id` is not used.

    torch's workers compare the process id of their parent, which is that of the server: it outlives a killed rank, as
    long as a worker does.
    """
    parent = multiprocessing.parent_process()
    if parent is None:  # not a worker process
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="exit-with-parent", daemon=True).start()


def _unpack(batches: list[Any]) -> Any:
    """Return the only batch that a reader has formed for one key."""
    (batch,) = batches
    return batch
