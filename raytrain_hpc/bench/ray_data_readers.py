"""Readers on Ray with a consumer in its own process: the Ray engine, and plain Ray Data."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from raytrain_hpc.bench.local_readers import BenchDataset
from raytrain_hpc.data.loader.block_stream import BlockPlan, BlockStream
from raytrain_hpc.data.loader.ray_loader import RayBlockSource, start_feeder
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.errors import RunFailedError

_TIMEOUT_S = 120.0


@ray.remote
class Consumer:
    """Actor that takes microbatches as a worker does, and discards them."""

    def wait_until_ready(self) -> bool:
        """Return once torch is imported."""
        import torch

        return torch.get_num_threads() > 0

    def consume_blocks(self, feeder: Any, spec: StreamSpec, plan: BlockPlan) -> float:
        """Measure tokens per second of the blocks from the feeder."""
        notes: list[str] = []
        stream = BlockStream(spec.open_stream(spec.open_dataset()), RayBlockSource(feeder, plan, 0), notes.append)
        start, tokens = time.perf_counter(), 0
        for microbatch in stream.iter_microbatches(
            range(plan.first_step, plan.stop_step), plan.microbatches_by_dp_rank[0]
        ):
            inputs, targets = microbatch.inputs, microbatch.targets
            tokens += min(inputs.size, targets.size)
        seconds = time.perf_counter() - start
        if stream.num_delivered < plan.num_groups:
            raise RunFailedError(f"only {stream.num_delivered} of {plan.num_groups} blocks were delivered: {notes}")
        return tokens / seconds

    def consume_split(self, shard: Any, length: int, batch: int) -> float:
        """Measure tokens per second of a streaming split, after its first batch."""
        import torch

        start, tokens = 0.0, 0
        for rows in shard.iter_torch_batches(batch_size=batch, prefetch_batches=4, dtypes=torch.int64):
            windows = rows["tokens"]
            inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
            if start:
                tokens += inputs.numel()
            else:
                start = time.perf_counter()
            if targets.shape[1] != length:
                raise RunFailedError("the split returned windows of another length")
        return tokens / (time.perf_counter() - start)

    def time_local_first_batch(self, spec: StreamSpec, step: int) -> float:
        """Measure the seconds in which a newly opened local engine reads the first microbatch of a step."""
        start = time.perf_counter()
        spec.open_stream(spec.open_dataset()).read_microbatch(step, 0)
        return time.perf_counter() - start


def measure_ray_engine(consumer: Any, dataset: BenchDataset, plan: BlockPlan) -> tuple[float, float]:
    """Measure tokens per second of the Ray engine after its first block, and its unshared memory in MiB."""
    feeder = start_feeder(dataset.stream_spec, plan)
    try:
        _wait_for_first_block(feeder)
        rate: float = ray.get(consumer.consume_blocks.remote(feeder, dataset.stream_spec, plan), timeout=_TIMEOUT_S)
        return rate, _read_private_mib(("Feeder", "MapWorker", "Consumer"))
    finally:
        ray.kill(feeder)


def time_first_block(consumer: Any, dataset: BenchDataset, plan: BlockPlan) -> float:
    """Measure the seconds from starting the feeder to its first block."""
    start = time.perf_counter()
    feeder = start_feeder(dataset.stream_spec, plan)
    try:
        _wait_for_first_block(feeder)
        return time.perf_counter() - start
    finally:
        ray.kill(feeder)


def measure_streaming_split(consumer: Any, parquet: Path, length: int, batch: int) -> float:
    """Measure tokens per second of plain Ray Data over the same windows in Parquet."""
    from ray.data import DataContext, read_parquet

    DataContext.get_current().enable_progress_bars = False
    shard = read_parquet(str(parquet)).streaming_split(1)[0]
    rate: float = ray.get(consumer.consume_split.remote(shard, length, batch), timeout=_TIMEOUT_S)
    return rate


def _wait_for_first_block(feeder: Any) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        answer, value = ray.get(feeder.take.remote(0, 0), timeout=_TIMEOUT_S)
        if answer == "block":
            return
        if answer == "lost" or time.monotonic() > deadline:
            raise RunFailedError(f"the readers delivered no block: {value}")
        time.sleep(0.01)


def _read_private_mib(names: tuple[str, ...]) -> float:
    """Sum the unshared memory of this user's Ray processes with these names, in MiB."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text()
            if command.startswith("ray::") and any(name in command for name in names):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        except OSError:
            continue  # the process has ended
    return total / 1024
