"""Readers in one process: the local engine, a bare gather of the same windows, and torch's DataLoader."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.data.loader.stream import Block, LocalStream, StreamSpec

NUM_WORKERS = 2
_PREFETCH = 32


@dataclass(frozen=True)
class BenchDataset:
    """The tokens as a dataset that a recipe opens, and as one flat file of uint16."""

    recipe: StreamSpec
    flat_file: Path
    num_tokens: int


def measure_local_engine(case: BenchDataset, steps: int) -> float:
    """Tokens a second of the local engine: a thread reads ahead, this one takes microbatches."""
    stream = case.recipe.open_stream(case.recipe.open_dataset())
    return measure_prefetch(stream, steps)


def measure_prefetch(stream: LocalStream, steps: int) -> float:
    """Tokens a second through the thread that reads ahead."""
    share = range(stream.num_microbatches)
    list(stream.iter_microbatches(range(1), share))
    began = time.perf_counter()
    ahead: Prefetcher[Block] = Prefetcher(
        stream.iter_blocks(range(steps), share, _PREFETCH // 4),
        size=lambda block: block.nbytes,
        count=lambda block: len(block.samples) // stream.micro_batch,
        max_items=_PREFETCH,
        max_bytes=1 << 30,
    )
    taken = tokens = 0
    while taken < steps * len(share):
        for one in ahead.take().split_microbatches(stream.micro_batch):
            inputs, targets = one.inputs, one.targets
            tokens += min(inputs.size, targets.size)
            taken += 1
    seconds = time.perf_counter() - began
    ahead.close()
    return tokens / seconds


def measure_gather(case: BenchDataset, steps: int) -> float:
    """Tokens a second of nothing but the copies, from places computed beforehand."""
    stream = case.recipe.open_stream(case.recipe.open_dataset())
    share, length = range(stream.num_microbatches), case.recipe.seq_len
    places = [stream.get_positions(step, v) for step in range(steps) for v in share]
    flat = np.asarray(
        np.memmap(case.flat_file, dtype=np.uint16, mode="r")
    )  # slicing it as a memmap takes twice as long
    began = time.perf_counter()
    tokens = 0
    for starts in places:
        inputs, targets = np.empty((len(starts), length), np.int64), np.empty((len(starts), length), np.int64)
        for row, start in enumerate(starts.tolist()):
            inputs[row] = flat[start : start + length]
            targets[row] = flat[start + 1 : start + 1 + length]
        tokens += inputs.size
    return tokens / (time.perf_counter() - began)


class WindowDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of a flat file; each worker maps it for itself."""

    def __init__(self, flat: Path, tokens: int, length: int):
        self._flat, self._count, self._length = flat, (tokens - 1) // length, length
        self._tokens: npt.NDArray[np.uint16] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._tokens is None:
            self._tokens = np.memmap(self._flat, dtype=np.uint16, mode="r")
        first = number * self._length
        window = torch.from_numpy(self._tokens[first : first + self._length + 1].astype(np.int64))
        return window[:-1], window[1:]


def measure_dataloader(case: BenchDataset, steps: int) -> float:
    """Tokens a second of a DataLoader with workers, from its first batch on."""
    batch = case.recipe.micro_batch
    windows = WindowDataset(case.flat_file, case.num_tokens, case.recipe.seq_len)
    batches = min(steps * case.recipe.global_batch // batch, len(windows) // batch - 1)
    # Ray is up, and a fork of a process with its threads can hang.
    loader = DataLoader(windows, batch, shuffle=True, num_workers=NUM_WORKERS, multiprocessing_context="forkserver")
    taken = iter(loader)
    next(taken)
    began, tokens = time.perf_counter(), 0
    for _ in range(batches):
        tokens += next(taken)[0].numel()
    seconds = time.perf_counter() - began
    del taken
    return tokens / seconds
