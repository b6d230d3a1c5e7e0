"""Peers of `bench recovery`: the PyTorch baseline with periodic checkpoints, from which it resumes after a restart.

    torchrun --max-restarts=3 ... restart_baseline.py JOB.json DIRECTORY
    python restart_baseline.py JOB.json DIRECTORY ray-train WORKERS CPU_SLOTS

Steps and pids are written to DIRECTORY; see `step_report`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_hpc.bench.step_report import StepReport
from raytrain_hpc.bench.torch_baseline import BaselineJob, build_model, build_optimizer, train_step

CHECKPOINT_INTERVAL = 10  # steps between checkpoints


def train_loop(
    job: BaselineJob,
    directory: Path,
    rank: int,
    world_size: int,
    on_checkpoint: Callable[[int], None] | None = None,
    generation: int = 0,
) -> None:
    """Train from the newest checkpoint to the end. Calls `on_checkpoint(step)` after each checkpoint, if given.

    Call when the process group is formed. `generation`: number of groups before it in this process.
    """
    torch.set_num_threads(job.threads)
    model: nn.Module = DistributedDataParallel(build_model(job), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, job)
    tokens, local_batch, first_step = np.load(job.tokens, mmap_mode="r"), job.global_batch_size // world_size, 0
    checkpoint = directory / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step = state["step"]
    report = StepReport(directory, rank, reports=rank == 0)
    for step in range(first_step, job.steps):
        report.raise_if_injected(step)
        offset = (step * job.global_batch_size) % len(tokens) + rank * local_batch
        loss = train_step(model, optimizer, np.array(tokens[offset : offset + local_batch]), job)
        report.record(step + 1, average_over_ranks(loss), generation, world_size)
        if (step + 1) % CHECKPOINT_INTERVAL == 0:
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").rename(checkpoint)
            if on_checkpoint is not None:
                on_checkpoint(step + 1)


def average_over_ranks(loss: float) -> float:
    """Return the mean over ranks of the loss of their rows, which does not depend on the number of ranks."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def run_under_torchrun(job: BaselineJob, directory: Path) -> None:
    """Train as one process of torchrun."""
    dist.init_process_group("gloo")
    train_loop(job, directory, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def run_under_ray_train(job: BaselineJob, directory: Path, workers: int, slots: int) -> None:
    """Train with a TorchTrainer that restarts its workers after a failure."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def train() -> None:
        import ray.train

        context = ray.train.get_context()
        train_loop(
            job,
            directory,
            context.get_world_rank(),
            context.get_world_size(),
            lambda step: ray.train.report({"step": step}),
        )

    ray.init(address="local", num_cpus=slots, include_dashboard=False, logging_level=logging.WARNING)
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(directory / "storage"), failure_config=FailureConfig(max_failures=3)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    job, directory = BaselineJob.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])
    if sys.argv[3:4] == ["ray-train"]:
        run_under_ray_train(job, directory, int(sys.argv[4]), int(sys.argv[5]))
    else:
        run_under_torchrun(job, directory)
