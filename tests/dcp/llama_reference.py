"""A Llama decoder with the names and the complex rotary positions of torchtitan, and ways to save it with DCP."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, FFN, SEQ_LEN = 259, 32, 2, 4, 2, 50, 24
HEAD_DIM = WIDTH // HEADS
THETA, EPS = 5000.0, 1e-4
WORDS = [f"model.num_heads={HEADS}", f"model.rope_theta={THETA}", f"model.norm_eps={EPS}", f"train.seq_len={SEQ_LEN}"]


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


def rotate_neighbors(x: Tensor, frequencies: Tensor) -> Tensor:
    """Multiply channels (2 i, 2 i + 1) of x [b, t, heads, head_dim], as complex numbers, by e^(i t frequency)."""
    angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), frequencies.to(x.dtype))
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.view_as_real(turned).flatten(-2)


def rotate_halves(x: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate channels (i, i + head_dim / 2) of x [b, t, heads, head_dim]."""
    neighbors = x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return rotate_neighbors(neighbors, frequencies).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class Attention(nn.Module):
    def __init__(self, frequencies: Tensor, *, qk_norm: bool, halves: bool):
        super().__init__()
        self.wq = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.q_norm, self.k_norm = (RMSNorm(HEAD_DIM) if qk_norm else nn.Identity() for _ in range(2))
        self.rotate = rotate_halves if halves else rotate_neighbors
        self.frequencies = frequencies

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).unflatten(-1, (-1, HEAD_DIM)) for projection in (self.wq, self.wk, self.wv))
        q, k = (self.rotate(y, self.frequencies) for y in (self.q_norm(q), self.k_norm(k)))
        q, k, v = (y.transpose(1, 2) for y in (q, *(y.repeat_interleave(HEADS // KV_HEADS, dim=2) for y in (k, v))))
        scores = (q @ k.transpose(-1, -2) / HEAD_DIM**0.5).masked_fill(
            torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), float("-inf")
        )
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, frequencies: Tensor, *, qk_norm: bool, halves: bool):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(frequencies, qk_norm=qk_norm, halves=halves), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """`qk_norm`: normalize queries and keys. `halves`: rotate halves of heads. `scaled`: Llama 3.1's positions."""

    def __init__(self, *, qk_norm: bool = False, halves: bool = False, tied: bool = False, scaled: bool = False):
        super().__init__()
        frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        if scaled:  # by 8, 1, 4 and 16 positions
            smooth = ((16 * frequencies / (2 * torch.pi) - 1) / (4 - 1)).clamp(0, 1)
            frequencies = (1 - smooth) * frequencies / 8 + smooth * frequencies
        self.tok_embeddings = nn.Embedding(VOCAB, WIDTH)
        blocks = (TransformerBlock(frequencies, qk_norm=qk_norm, halves=halves) for _ in range(LAYERS))
        self.layers = nn.ModuleDict({str(number): block for number, block in enumerate(blocks)})
        self.norm, self.output = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def build_llama(**options: bool) -> Llama:
    """Return a model with the same random weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Llama(**options)


def save_alone(directory: Path, state: dict[str, Any]) -> Path:
    """Save a state dict from one process without a process group, and return the directory."""
    dcp.save(state, checkpoint_id=directory, no_dist=True)
    return directory


def save_sharded(rank: int, rendezvous: Any, directory: Path, world_size: int, tensor_parallel: int) -> None:
    """Save the model of `build_llama` from one of several ranks: FSDP2, over tensor parallelism if that is above 1.

    As torchtitan does, weights are saved under their own names, beside the state of an optimizer that has made a step,
    and objects of other kinds.
    """
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    prefix = dist.PrefixStore(f"dcp-{rendezvous.generation}", store)
    dist.init_process_group("gloo", store=prefix, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
    model = build_llama()
    if tensor_parallel > 1:
        columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
        plan = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")}
        for block in model.layers.values():
            parallelize_module(block, mesh["tp"], plan)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # with a learning rate of 0: it has moments then, and weights stay
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        "train_state": {"step": torch.tensor(7, dtype=torch.int32), "losses": io.BytesIO(b"...")},
        "dataloader": {f"dp_rank_{rank}": {"position": rank}},
    }
    dcp.save(state, checkpoint_id=directory)
