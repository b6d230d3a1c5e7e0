"""The peers of `bench recovery`: the plain loop with a checkpoint every so many steps, from which it goes on.

    torchrun --max-restarts=3 ... resuming_loop.py JOB.json DIRECTORY
    python resuming_loop.py JOB.json DIRECTORY ray-train WORKERS CPU_SLOTS

Rank 0 writes a line a step to DIRECTORY/steps.jsonl: when it was done (Unix time). Every rank leaves its pid in
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
    """Train from the newest checkpoint to the end. `report(step)` is called after a checkpoint, if given."""
    torch.set_num_threads(job.threads)
    model: nn.Module = DistributedDataParallel(build_model(job), gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, job)
    tokens, share, first = np.load(job.tokens, mmap_mode="r"), job.global_batch // world_size, 0
    saved = directory / "checkpoint.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    (directory / f"{rank}.pid").write_text(str(os.getpid()))
    with (directory / "steps.jsonl").open("a") if rank == 0 else open(os.devnull, "w") as file:
        for step in range(first, job.steps):
            at = (step * job.global_batch) % len(tokens) + rank * share
            train_step(model, optimizer, np.array(tokens[at : at + share]), job)
            print(json.dumps({"step": step + 1, "time/unix": time.time()}), file=file, flush=True)
            if (step + 1) % CHECKPOINT_INTERVAL == 0:
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                    torch.save(state, saved.with_suffix(".new"))
                    saved.with_suffix(".new").rename(saved)
                if on_checkpoint is not None:
                    on_checkpoint(step + 1)


def run_under_torchrun(job: BaselineJob, directory: Path) -> None:
    """One process of torchrun's."""
    dist.init_process_group("gloo")
    train_loop(job, directory, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


def run_under_ray_train(job: BaselineJob, directory: Path, workers: int, slots: int) -> None:
    """The driver of a TorchTrainer that starts its workers again when one has failed."""
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
    described, place = BaselineJob.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2])
    if sys.argv[3:4] == ["ray-train"]:
        run_under_ray_train(described, place, int(sys.argv[4]), int(sys.argv[5]))
    else:
        run_under_torchrun(described, place)
