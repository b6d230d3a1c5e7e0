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
    """The same tokens as a dataset opened by `stream_spec`, and as one flat file of uint16."""

    stream_spec: StreamSpec
    flat_file: Path
    num_tokens: int


def measure_local_engine(dataset: BenchDataset, steps: int) -> float:
    """Measure tokens per second of the local engine: a thread prefetches, the caller takes microbatches."""
    stream = dataset.stream_spec.open_stream(dataset.stream_spec.open_dataset())
    return measure_prefetch(stream, steps)


def measure_prefetch(stream: LocalStream, steps: int) -> float:
    """Measure tokens per second through the prefetch thread."""
    microbatches = range(stream.num_microbatches)
    list(stream.iter_microbatches(range(1), microbatches))
    start = time.perf_counter()
    prefetcher: Prefetcher[Block] = Prefetcher(
        stream.iter_blocks(range(steps), microbatches, _PREFETCH // 4),
        size=lambda block: block.nbytes,
        count=lambda block: len(block.samples) // stream.micro_batch_size,
        max_items=_PREFETCH,
        max_bytes=1 << 30,
    )
    num_taken = tokens = 0
    while num_taken < steps * len(microbatches):
        for microbatch in prefetcher.take().split_microbatches(stream.micro_batch_size):
            inputs, targets = microbatch.inputs, microbatch.targets
            tokens += min(inputs.size, targets.size)
            num_taken += 1
    seconds = time.perf_counter() - start
    prefetcher.close()
    return tokens / seconds


def measure_gather(dataset: BenchDataset, steps: int) -> float:
    """Measure tokens per second of the copies alone, from precomputed offsets."""
    stream = dataset.stream_spec.open_stream(dataset.stream_spec.open_dataset())
    microbatches, length = range(stream.num_microbatches), dataset.stream_spec.seq_len
    offsets = [stream.get_positions(step, v) for step in range(steps) for v in microbatches]
    flat = np.asarray(np.memmap(dataset.flat_file, dtype=np.uint16, mode="r"))  # slicing a memmap takes twice as long
    begin = time.perf_counter()
    tokens = 0
    for starts in offsets:
        inputs, targets = np.empty((len(starts), length), np.int64), np.empty((len(starts), length), np.int64)
        for row, start in enumerate(starts.tolist()):
            inputs[row] = flat[start : start + length]
            targets[row] = flat[start + 1 : start + 1 + length]
        tokens += inputs.size
    return tokens / (time.perf_counter() - begin)


class WindowDataset(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset of the windows of a flat file, which each DataLoader worker maps itself."""

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


def measure_dataloader(dataset: BenchDataset, steps: int) -> float:
    """Measure tokens per second of a torch DataLoader with workers, after its first batch."""
    batch = dataset.stream_spec.micro_batch_size
    windows = WindowDataset(dataset.flat_file, dataset.num_tokens, dataset.stream_spec.seq_len)
    batches = min(steps * dataset.stream_spec.global_batch_size // batch, len(windows) // batch - 1)
    # Ray may be initialized here, and forking a process with Ray's threads can hang.
    loader = DataLoader(windows, batch, shuffle=True, num_workers=NUM_WORKERS, multiprocessing_context="forkserver")
    batches_iter = iter(loader)
    next(batches_iter)
    start, tokens = time.perf_counter(), 0
    for _ in range(batches):
        tokens += next(batches_iter)[0].numel()
    seconds = time.perf_counter() - start
    del batches_iter
    return tokens / seconds
