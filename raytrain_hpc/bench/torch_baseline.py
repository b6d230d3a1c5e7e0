"""Peers of `bench step` and `bench device`: the same model in a plain PyTorch loop, or that of another library.

    python torch_baseline.py JOB.json STEPS.jsonl
    torchrun --nproc-per-node=2 torch_baseline.py JOB.json STEPS.jsonl

Every rank appends one line per step, rank 0 to STEPS.jsonl and the others to STEPS.RANK.jsonl: the Unix time of its end
and the mean loss of the rank. Every rank writes its pid to RANK.pid.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import count_init_threads, init_weights

LossFunction = Callable[[nn.Module, Tensor], Tensor]  # (model, windows int64 [b, t + 1]) -> mean loss, a scalar
PLAIN, TRANSFORMERS, TORCHTITAN = PEERS = ("plain", "transformers", "torchtitan")
DEVICE_FILE = "device.json"


@dataclass(frozen=True)
class BaselineJob:
    """Model, data and optimizer of the baseline.

    `tokens`: path of a .npy file with windows int64 [n * global_batch_size, seq_len + 1] for n steps, used cyclically.
    `peer`: "plain" for the platform's decoder, or the library whose model has the same sizes and initial weights.
    `measures_device`: sample power and clock, and profile one more step after the last; rank 0 writes both, and the
    peak memory of the steps before, to DEVICE_FILE.
    """

    shape: ModelSpec
    tokens: str
    seq_len: int
    seed: int
    steps: int
    global_batch_size: int
    micro_batch_size: int
    threads: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float
    dtype: str = "fp32"
    compile: bool = False
    device: str = "cpu"
    peer: str = PLAIN
    measures_device: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BaselineJob:
        """Create a job from the result of `to_json`."""
        return cls(**{**data, "shape": ModelSpec(**data["shape"]), "betas": tuple(data["betas"])})


def build_model(job: BaselineJob, num_threads: int = 1) -> nn.Module:
    """Build the model of the peer with the platform's initial weights, on the CPU. It returns logits.

    `num_threads`: threads that draw the weights, which do not depend on it.

    Raises:
        ImportError: The library of the peer is not installed.
        ModelError: The library has no such model.
    """
    if job.peer == TRANSFORMERS:
        from raytrain_hpc.bench.transformers_baseline import build_transformers_model

        return build_transformers_model(job.shape, job.seed, job.seq_len, num_threads)
    if job.peer == TORCHTITAN:
        from raytrain_hpc.bench.torchtitan_baseline import build_torchtitan_model

        return build_torchtitan_model(job.shape, job.seed, job.seq_len, num_threads)
    model = Decoder(job.shape)
    init_weights(model, job.seed, num_threads)
    return model


def prepare_model(job: BaselineJob, world_size: int) -> nn.Module:
    """Build the model on the device and replicate it by DDP. torchtitan's is compiled and sharded as its trainer does.

    Call after the process group is formed.
    """
    model = build_model(job, count_init_threads(world_size)).to(job.device)
    if job.peer == TORCHTITAN:
        from torch.distributed.device_mesh import init_device_mesh

        from raytrain_hpc.bench.torchtitan_baseline import shard_torchtitan_model

        mesh = init_device_mesh(job.device, (world_size,))
        shard_torchtitan_model(model, mesh, compile=job.compile, dtype=job.dtype)
        return model
    return DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else model


def build_optimizer(model: nn.Module, job: BaselineJob) -> torch.optim.Optimizer:
    """Build a fused AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.lr, betas=job.betas, eps=job.eps, fused=True)


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy, a scalar, over windows int64 [b, t + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_loss_function(job: BaselineJob) -> LossFunction:
    """Return the loss function, compiled together with the model if the job says so; of torchtitan, its own."""
    if job.peer == TORCHTITAN:
        from raytrain_hpc.bench.torchtitan_baseline import compute_torchtitan_loss

        loss_of_logits = torch.compile(compute_torchtitan_loss) if job.compile else compute_torchtitan_loss
        return lambda model, tokens: loss_of_logits(model(tokens[:, :-1]), tokens[:, 1:])
    return torch.compile(compute_loss) if job.compile else compute_loss


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: npt.NDArray[np.int64],
    job: BaselineJob,
    loss_function: LossFunction = compute_loss,
) -> float:
    """Run one optimizer step on this rank's windows int64 [b, seq_len + 1]. Return their mean loss."""
    optimizer.zero_grad()
    microbatches = [windows[i : i + job.micro_batch_size] for i in range(0, len(windows), job.micro_batch_size)]
    total = torch.zeros((), device=job.device)
    uses_autocast = job.dtype == "bf16" and job.peer != TORCHTITAN  # FSDP2 casts torchtitan's model
    for number, microbatch in enumerate(microbatches, start=1):
        tokens = torch.from_numpy(microbatch).to(job.device)
        is_last = number == len(microbatches)
        with nullcontext() if is_last else skip_gradient_sync(model):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=uses_autocast):
                loss = loss_function(model, tokens) / len(microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if job.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
    optimizer.step()
    return total.item()


def skip_gradient_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context for all microbatches of a step but the last, so that DDP all-reduces once per step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def main(job: BaselineJob, report: Path) -> None:
    """Train and write one line per step to `report`, or beside it on ranks above 0."""
    torch.set_num_threads(job.threads)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with process_group(job, world_size):
        model = prepare_model(job, world_size)
        optimizer, loss_function = build_optimizer(model, job), make_loss_function(job)
        tokens = np.load(job.tokens, mmap_mode="r")
        local_batch = job.global_batch_size // world_size

        def run_step(step: int) -> float:
            first = (step * job.global_batch_size) % len(tokens) + rank * local_batch
            return train_step(model, optimizer, np.array(tokens[first : first + local_batch]), job, loss_function)

        report.with_name(f"{rank}.pid").write_text(str(os.getpid()))
        with report.with_suffix(f".{rank}.jsonl" if rank else ".jsonl").open("a") as file:

            def run_and_record_step(step: int) -> None:
                line = {"loss": run_step(step), "unix": time.time()}
                print(json.dumps(line), file=file, flush=True)

            if job.measures_device:
                measure_device(job, run_and_record_step, run_step, report.with_name(DEVICE_FILE))
            else:
                for step in range(job.steps):
                    run_and_record_step(step)


def measure_device(
    job: BaselineJob, run_and_record_step: Callable[[int], None], run_step: Callable[[int], float], out: Path
) -> None:
    """Train, profile one more step, and write power, clock, kernels and peak memory of the device to `out`."""
    from raytrain_hpc.bench.step_profile import profile_step  # not in other runs, whose memory is compared
    from raytrain_hpc.bench.telemetry import sample_telemetry
    from raytrain_hpc.torch_device import get_peak_memory_gib

    device = torch.device(job.device)
    with sample_telemetry(device) as telemetry:
        for step in range(job.steps):
            run_and_record_step(step)
    peak_gib = get_peak_memory_gib(device)
    kernels = profile_step(lambda: run_step(job.steps), device)
    facts = {"peak_gib": peak_gib, "telemetry": telemetry.to_json(), "kernels": kernels.to_json()}
    out.write_text(json.dumps(facts))


@contextmanager
def process_group(job: BaselineJob, world_size: int) -> Iterator[None]:
    """Form the process group while the context is active: of all ranks, or of one rank if the peer needs a group."""
    if world_size == 1 and job.peer != TORCHTITAN:
        yield
        return
    backend = "nccl" if job.device == "cuda" else "gloo"
    if world_size > 1:
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


if __name__ == "__main__":
    main(BaselineJob.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
