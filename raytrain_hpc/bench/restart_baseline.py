"""Peers of `bench recovery`: the PyTorch baseline with periodic checkpoints, from which it resumes after a restart.

    torchrun --max-restarts=3 ... restart_baseline.py JOB.json DIRECTORY
    python restart_baseline.py JOB.json DIRECTORY ray-train WORKERS CPU_SLOTS

Rank 0 appends one line per step to DIRECTORY/steps.jsonl, with the Unix time of its end. Every rank writes its pid to
DIRECTORY/RANK.pid.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_hpc.bench.torch_baseline import BaselineJob, build_model, build_optimizer, train_step

CHECKPOINT_INTERVAL = 10  # steps between checkpoints


def train_loop(job: BaselineJob, directory: Path, rank: int, world_size: int, on_checkpoint: Any = None) -> None:
    """Train from the newest checkpoint to the end. Calls `on_checkpoint(step)` after each checkpoint, if given."""
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
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    with (directory / "steps.jsonl").open("a") if rank == 0 else open(os.devnull, "w") as file:
        for step in range(first_step, job.steps):
            offset = (step * job.global_batch_size) % len(tokens) + rank * local_batch
            train_step(model, optimizer, np.array(tokens[offset : offset + local_batch]), job)
            print(json.dumps({"step": step + 1, "time/unix": time.time()}), file=file, flush=True)
            if (step + 1) % CHECKPOINT_INTERVAL == 0:
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, checkpoint.with_suffix(".new"))
                    checkpoint.with_suffix(".new").rename(checkpoint)
                if on_checkpoint is not None:
                    on_checkpoint(step + 1)


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
