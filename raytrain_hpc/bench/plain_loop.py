"""The peer of `bench step`: the same model trained by a plain PyTorch loop, as one would write it, with no Ray.

python plain_loop.py JOB.json STEPS.jsonl
torchrun --nproc-per-node=2 plain_loop.py JOB.json STEPS.jsonl

Rank 0 writes a line a step: when it was done (Unix time), and its own loss. Every rank leaves its pid in RANK.pid.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.initial import initialise
from raytrain_hpc.shape import ModelShape


@dataclass(frozen=True)
class Job:
    """What is trained. `tokens` names a .npy file of windows int64 [n * global_batch, seq_len + 1]: n steps, again and
    again."""

    shape: ModelShape
    tokens: str
    seed: int
    steps: int
    global_batch: int
    micro_batch: int
    threads: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float

    def to_json(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """The inverse of `to_json`."""
        return cls(**{**data, "shape": ModelShape(**data["shape"]), "betas": tuple(data["betas"])})


def build_model(job: Job) -> Decoder:
    """The decoder with its first weights."""
    model = Decoder(job.shape)
    initialise(model, job.seed)
    return model


def build_optimizer(model: nn.Module, job: Job) -> torch.optim.Optimizer:
    """AdamW, with weight decay on the matrices."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.lr, betas=job.betas, eps=job.eps, fused=True)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, windows: npt.NDArray[np.int64], job: Job) -> float:
    """One optimizer step over this rank's windows int64 [b, seq_len + 1]. Returns their mean loss."""
    optimizer.zero_grad()
    parts = [windows[i : i + job.micro_batch] for i in range(0, len(windows), job.micro_batch)]
    total = 0.0
    for number, part in enumerate(parts, start=1):
        tokens = torch.from_numpy(part)
        last = number == len(parts)
        with nullcontext() if last else gradients_pile_up(model):
            logits = model(tokens[:, :-1])
            loss: Tensor = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    if job.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
    optimizer.step()
    return total


def gradients_pile_up(model: nn.Module) -> AbstractContextManager[None]:
    """The context of every microbatch of a step but the last: DDP synchronises once a step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def main(job: Job, report: Path) -> None:
    """Train, and report every step."""
    torch.set_num_threads(job.threads)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model: nn.Module = build_model(job)
    if world > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, job)
    tokens = np.load(job.tokens, mmap_mode="r")
    share = job.global_batch // world
    report.with_name(f"{rank}.pid").write_text(str(os.getpid()))
    with report.open("a") if rank == 0 else open(os.devnull, "w") as file:
        for step in range(job.steps):
            first = (step * job.global_batch) % len(tokens) + rank * share
            loss = train_step(model, optimizer, np.array(tokens[first : first + share]), job)
            print(json.dumps({"unix": time.time(), "loss": loss}), file=file, flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Job.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
