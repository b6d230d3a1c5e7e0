"""Readers on Ray with a consumer in a process of its own: the Ray engine, and plain Ray Data."""

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
    """Takes microbatches as a worker does, and throws them away."""

    def ready(self) -> bool:
        """Up, with what it needs imported."""
        import torch

        return torch.get_num_threads() > 0

    def engine(self, feeder: Any, recipe: StreamSpec, plan: BlockPlan) -> float:
        """Tokens a second of what the feeder delivers."""
        notes: list[str] = []
        stream = BlockStream(recipe.open_stream(recipe.open_dataset()), RayBlockSource(feeder, plan, 0), notes.append)
        began, tokens = time.perf_counter(), 0
        for microbatch in stream.iter_microbatches(range(plan.first, plan.stop), plan.microbatches_per_rank[0]):
            inputs, targets = microbatch.inputs, microbatch.targets
            tokens += min(inputs.size, targets.size)
        seconds = time.perf_counter() - began
        if stream.num_delivered < plan.num_groups:
            raise RunFailedError(f"only {stream.num_delivered} of {plan.num_groups} blocks were delivered: {notes}")
        return tokens / seconds

    def split(self, shard: Any, length: int, batch: int) -> float:
        """Tokens a second of a split, from its first batch on."""
        import torch

        began, tokens = 0.0, 0
        for rows in shard.iter_torch_batches(batch_size=batch, prefetch_batches=4, dtypes=torch.int64):
            windows = rows["tokens"]
            inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
            if began:
                tokens += inputs.numel()
            else:
                began = time.perf_counter()
            if targets.shape[1] != length:
                raise RunFailedError("the split gave other windows")
        return tokens / (time.perf_counter() - began)

    def local_first(self, recipe: StreamSpec, step: int) -> float:
        """Seconds until the local engine, opened anew, has read the first microbatch of a step."""
        began = time.perf_counter()
        recipe.open_stream(recipe.open_dataset()).read_microbatch(step, 0)
        return time.perf_counter() - began


def measure_ray_engine(consumer: Any, case: BenchDataset, plan: BlockPlan) -> tuple[float, float]:
    """Tokens a second that the Ray engine delivers once it is up, and its resident memory in MiB."""
    feeder = start_feeder(case.recipe, plan)
    try:
        _wait_for_first_block(feeder)
        rate: float = ray.get(consumer.engine.remote(feeder, case.recipe, plan), timeout=_TIMEOUT_S)
        return rate, _read_private_mib(("Feeder", "MapWorker", "Consumer"))
    finally:
        ray.kill(feeder)


def time_first_block(consumer: Any, case: BenchDataset, plan: BlockPlan) -> float:
    """Seconds from starting the feeder until its first block is there."""
    began = time.perf_counter()
    feeder = start_feeder(case.recipe, plan)
    try:
        _wait_for_first_block(feeder)
        return time.perf_counter() - began
    finally:
        ray.kill(feeder)


def measure_streaming_split(consumer: Any, parquet: Path, length: int, batch: int) -> float:
    """Tokens a second of plain Ray Data over the same windows in Parquet."""
    from ray.data import DataContext, read_parquet

    DataContext.get_current().enable_progress_bars = False
    shard = read_parquet(str(parquet)).streaming_split(1)[0]
    rate: float = ray.get(consumer.split.remote(shard, length, batch), timeout=_TIMEOUT_S)
    return rate


def _wait_for_first_block(feeder: Any) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        answer, value = ray.get(feeder.take.remote(0, 0), timeout=_TIMEOUT_S)
        if answer == "block":
            return
        if answer == "lost" or time.monotonic() > deadline:
            raise RunFailedError(f"the readers did not come up: {value}")
        time.sleep(0.01)


def _read_private_mib(names: tuple[str, ...]) -> float:
    """Memory that no other process shares, of this user's Ray processes with these names."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_text()
            if command.startswith("ray::") and any(name in command for name in names):
                lines = (entry / "smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        except OSError:
            continue  # ended meanwhile
    return total / 1024
