"""Peer of `bench step`: the same model trained by a plain PyTorch loop, without Ray.

    python torch_baseline.py JOB.json STEPS.jsonl
    torchrun --nproc-per-node=2 torch_baseline.py JOB.json STEPS.jsonl

Rank 0 writes one line per step: the Unix time of its end, the loss of rank 0, and on a GPU the peak allocated memory.
Every rank writes its pid to RANK.pid.
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

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import init_weights


@dataclass(frozen=True)
class BaselineJob:
    """Model, data and optimizer of the baseline.

    `tokens`: path of a .npy file with windows int64 [n * global_batch_size, seq_len + 1] for n steps, used cyclically.
    `model`: "decoder", or "transformers" for the Llama of that library with the same sizes.
    """

    shape: ModelSpec
    tokens: str
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
    model: str = "decoder"

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BaselineJob:
        """Create a job from the result of `to_json`."""
        return cls(**{**data, "shape": ModelSpec(**data["shape"]), "betas": tuple(data["betas"])})


def build_model(job: BaselineJob) -> nn.Module:
    """Build the decoder with the platform's initial weights, or transformers' Llama with its own."""
    if job.model == "transformers":
        return LogitsOnly(build_transformers_llama(job.shape))
    model = Decoder(job.shape)
    init_weights(model, job.seed)
    return model


class LogitsOnly(nn.Module):
    """Wrapper that returns only the logits of a transformers model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, t, vocab_size] of tokens int64 [b, t]."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def build_transformers_llama(model_spec: ModelSpec) -> nn.Module:
    """Build transformers' Llama with the sizes of `model_spec`.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": model_spec.vocab_size,
        "hidden_size": model_spec.hidden_size,
        "intermediate_size": model_spec.ffn_size,
        "num_hidden_layers": model_spec.num_layers,
        "num_attention_heads": model_spec.num_heads,
        "num_key_value_heads": model_spec.num_kv_heads,
        "tie_word_embeddings": model_spec.tie_embeddings,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**sizes)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def build_optimizer(model: nn.Module, job: BaselineJob) -> torch.optim.Optimizer:
    """Build a fused AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.lr, betas=job.betas, eps=job.eps, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: npt.NDArray[np.int64], job: BaselineJob
) -> float:
    """Run one optimizer step on this rank's windows int64 [b, seq_len + 1]. Return their mean loss."""
    optimizer.zero_grad()
    microbatches = [windows[i : i + job.micro_batch_size] for i in range(0, len(windows), job.micro_batch_size)]
    total = torch.zeros((), device=job.device)
    loss_of = torch.compile(compute_loss) if job.compile else compute_loss
    for number, microbatch in enumerate(microbatches, start=1):
        tokens = torch.from_numpy(microbatch).to(job.device)
        is_last = number == len(microbatches)
        with nullcontext() if is_last else skip_gradient_sync(model):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=job.dtype == "bf16"):
                loss = loss_of(model, tokens) / len(microbatches)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if job.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
    optimizer.step()
    return total.item()


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token cross-entropy, a scalar, over windows int64 [b, t + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def skip_gradient_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return the context for all microbatches of a step but the last, so that DDP all-reduces once per step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def main(job: BaselineJob, report: Path) -> None:
    """Train and write one line per step to `report`."""
    torch.set_num_threads(job.threads)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = build_model(job).to(job.device)
    if world_size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = build_optimizer(model, job)
    tokens = np.load(job.tokens, mmap_mode="r")
    local_batch = job.global_batch_size // world_size
    report.with_name(f"{rank}.pid").write_text(str(os.getpid()))
    with report.open("a") if rank == 0 else open(os.devnull, "w") as file:
        for step in range(job.steps):
            first = (step * job.global_batch_size) % len(tokens) + rank * local_batch
            loss = train_step(model, optimizer, np.array(tokens[first : first + local_batch]), job)
            line = {"unix": time.time(), "loss": loss}
            if job.device == "cuda":
                line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            print(json.dumps(line), file=file, flush=True)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(BaselineJob.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
