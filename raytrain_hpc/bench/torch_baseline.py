"""The peer of `bench step`: the same model trained by a plain PyTorch loop, as one would write it, with no Ray.

python plain_loop.py JOB.json STEPS.jsonl
torchrun --nproc-per-node=2 plain_loop.py JOB.json STEPS.jsonl

Rank 0 writes a line a step: when it was done (Unix time), its own loss, and on a GPU the peak of allocated memory.
Every rank leaves its pid in RANK.pid.
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
    """What is trained. `tokens` names a .npy file of windows int64 [n * global_batch, seq_len + 1]: n steps, again and
    again. `model`: "decoder" or "transformers", for its Llama of the same shape."""

    shape: ModelSpec
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
    dtype: str = "fp32"
    compile: bool = False
    device: str = "cpu"
    model: str = "decoder"

    def to_json(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BaselineJob:
        """The inverse of `to_json`."""
        return cls(**{**data, "shape": ModelSpec(**data["shape"]), "betas": tuple(data["betas"])})


def build_model(job: BaselineJob) -> nn.Module:
    """The decoder with its first weights, or transformers' Llama with weights of its own."""
    if job.model == "transformers":
        return LogitsOnly(build_transformers_llama(job.shape))
    model = Decoder(job.shape)
    init_weights(model, job.seed)
    return model


class LogitsOnly(nn.Module):
    """A model of transformers, of which only the logits are wanted."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [b, t, vocab_size] of tokens int64 [b, t]."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def build_transformers_llama(shape: ModelSpec) -> nn.Module:
    """Of this shape. Raises ImportError where transformers is not installed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": shape.tie_embeddings,
        "attn_implementation": "sdpa",
    }
    config = LlamaConfig(**sizes)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def build_optimizer(model: nn.Module, job: BaselineJob) -> torch.optim.Optimizer:
    """AdamW, with weight decay on the matrices."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": job.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=job.lr, betas=job.betas, eps=job.eps, fused=True)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, windows: npt.NDArray[np.int64], job: BaselineJob
) -> float:
    """One optimizer step over this rank's windows int64 [b, seq_len + 1]. Returns their mean loss."""
    optimizer.zero_grad()
    parts = [windows[i : i + job.micro_batch] for i in range(0, len(windows), job.micro_batch)]
    total = torch.zeros((), device=job.device)
    loss_of = torch.compile(compute_loss) if job.compile else compute_loss
    for number, part in enumerate(parts, start=1):
        tokens = torch.from_numpy(part).to(job.device)
        last = number == len(parts)
        with nullcontext() if last else skip_gradient_sync(model):
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=job.dtype == "bf16"):
                loss = loss_of(model, tokens) / len(parts)
            loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    if job.grad_clip:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
    optimizer.step()
    return total.item()


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross entropy of the next token, a scalar, over windows int64 [b, t + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def skip_gradient_sync(model: nn.Module) -> AbstractContextManager[None]:
    """The context of every microbatch of a step but the last: DDP synchronises once a step."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def main(job: BaselineJob, report: Path) -> None:
    """Train, and report every step."""
    torch.set_num_threads(job.threads)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = build_model(job).to(job.device)
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
            line = {"unix": time.time(), "loss": loss}
            if job.device == "cuda":
                line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            print(json.dumps(line), file=file, flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(BaselineJob.from_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
