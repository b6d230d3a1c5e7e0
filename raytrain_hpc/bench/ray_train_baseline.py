"""Peer of `bench startup`: the training steps of the PyTorch baseline under Ray Train's TorchTrainer.

    python ray_train_baseline.py JOB.json MARKS.json WORKERS CPU_SLOTS

Writes the Unix time at which each part of the startup ended on rank 0.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> None:
    """Train on one worker; called by TorchTrainer."""
    marks = {"actors": time.time()}
    import numpy as np
    import ray.train
    import torch
    from ray.train.torch import prepare_model

    from raytrain_hpc.bench.torch_baseline import BaselineJob, build_model, build_optimizer, train_step

    marks["imports"] = time.time()
    job = BaselineJob.from_json(config["job"])
    torch.set_num_threads(job.threads)
    context = ray.train.get_context()
    rank, local_batch = context.get_world_rank(), job.global_batch_size // context.get_world_size()
    model = prepare_model(build_model(job), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = build_optimizer(model, job)
    tokens = np.load(job.tokens, mmap_mode="r")
    marks["model"] = time.time()
    for step in range(job.steps):
        first = step * job.global_batch_size + rank * local_batch
        loss = train_step(model, optimizer, np.array(tokens[first : first + local_batch]), job)
        marks.setdefault("first step", time.time())
        ray.train.report({"loss": loss})
    if rank == 0:
        Path(config["marks"]).write_text(json.dumps(config["before"] | marks))


def main(job: Path, marks: Path, workers: int, slots: int) -> None:
    """Start Ray and train."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    before = {"driver": time.time()}
    ray.init(address="local", num_cpus=slots, include_dashboard=False, logging_level=logging.WARNING)
    before["Ray"] = time.time()
    trainer = TorchTrainer(
        train,
        train_loop_config={"job": json.loads(job.read_text()), "marks": str(marks), "before": before},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(marks.parent / "storage")),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
