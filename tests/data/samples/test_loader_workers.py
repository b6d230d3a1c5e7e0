"""Processes that read samples for a rank end with it, even if it is killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from raytrain_hpc.data.samples.loader_workers import start_workers_afresh
from raytrain_hpc.data.samples.sample_reader import SampleReader, iter_batches_in_readers

PATIENCE_S = 30


class ProcessIds(Dataset[int]):
    """A dataset whose samples are the ids of the processes that read them."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def iterate_loader() -> Any:
    loader = DataLoader(ProcessIds(), batch_size=1, num_workers=2)
    with start_workers_afresh(loader):
        return iter(loader)


def iterate_reader() -> Any:
    keys = [(np.array([index]), np.array([index])) for index in range(1000)]
    return iter_batches_in_readers(SampleReader(ProcessIds(), None, seed=1), keys, 2, 4, pin_memory=False)


def read(connection: Connection, start: Any) -> None:
    batches = start()
    connection.send([int(next(batches)) for _ in range(2)])
    time.sleep(2 * PATIENCE_S)


@pytest.mark.parametrize("start", [iterate_loader, iterate_reader], ids=["loader", "readers"])
def test_readers_of_a_killed_process_end(start: Any) -> None:
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    rank = get_context("spawn").Process(target=read, args=(sender, start))
    rank.start()
    try:
        assert receiver.poll(PATIENCE_S)
        readers = receiver.recv()
        assert len({rank.pid, *readers}) == 3
    finally:
        os.kill(rank.pid or 0, signal.SIGKILL)
        rank.join()
    deadline = time.monotonic() + PATIENCE_S
    while remaining := [reader for reader in readers if is_running(reader)]:
        assert time.monotonic() < deadline, f"processes {remaining} still run"
        time.sleep(0.05)


def test_readers_start_before_a_batch_is_requested_and_draw_nothing_from_the_default_generator() -> None:
    before, state = set(active_children()), torch.get_rng_state()
    batches = iterate_reader()
    readers = set(active_children()) - before
    assert len(readers) == 2 and torch.equal(torch.get_rng_state(), state)
    del batches
    assert not any(reader.is_alive() for reader in readers)


def is_running(pid: int) -> bool:
    """Return whether a process runs. One that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Epochs(IterableDataset[int]):
    """Yields its epoch, which persistent workers see since the memory is shared, as that of Hugging Face streams is."""

    def __init__(self) -> None:
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[int]:
        yield int(self.epoch)


@pytest.mark.parametrize("loader_class", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("is_ray_loaded", [False, True])
def test_persistent_workers_see_the_epoch(
    loader_class: Any, is_ray_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ray_loaded:
        import ray  # noqa: F401  # then parts are pickled as Ray does it
    else:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
    dataset = Epochs()
    loader = loader_class(dataset, batch_size=None, num_workers=1, persistent_workers=True)
    seen = []
    for epoch in range(3):
        dataset.epoch.fill_(epoch)
        with start_workers_afresh(loader):
            seen += list(loader)
    assert seen == [0, 1, 2]
