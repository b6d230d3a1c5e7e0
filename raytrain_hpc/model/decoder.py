"""The decoder: GPT-2, Llama and anything between the two, as plain math on one rank's tensors.

A block touches only its own parameters and the root's forward only the root's, and only routers have buffers: blocks
can be compiled, recomputed, sharded or built on the meta device one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import VOCABULARY_TILE, ModelShape
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.state.keyed_rng import fold, keyed_dropout

IGNORED = -100  # a target that is no part of the loss

Rotary = tuple[Tensor, Tensor]  # cosines and sines, each [t, 1, head_dim / 2], or [b, t, 1, head_dim / 2]


@dataclass(frozen=True)
class Beside:
    """What a block needs beside the residual stream. Plain to wrappers, which cast the tensors of tuples."""

    rotary: Rotary | None = None
    keys: Tensor | None = None  # this layer's own, int64 [b, t]
    documents: Tensor | None = None  # of whole sequences, int64 [b, t]
    counted: float = 1.0


class Decoder(nn.Module):
    """Tokens to logits, or a run of the layers on the way. Dropout happens in training mode, where keys are given."""

    def __init__(self, shape: ModelShape, layers: range | None = None):
        """`layers`: those that it has, by default all; the first comes with the embedding, the last with the head."""
        super().__init__()
        self.shape = shape
        layers = range(shape.num_layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == shape.num_layers
        learned = first and shape.positions == "learned"
        self.embedding = _embedding(shape.vocab_size, shape.hidden_size) if first else None
        self.positions = _embedding(shape.max_positions, shape.hidden_size) if learned else None
        self.layers = nn.ModuleDict({str(number): Block(shape) for number in layers})
        self.norm = Norm(shape) if last else None
        self.head = Head(shape, tied=first and shape.tie_embeddings) if last else None

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        counted: float = 1.0,
    ) -> Tensor:
        """Logits [b, t, vocab_size] of tokens int64 [b, t]; keys int64 [b, t] from `state.rng.position_keys`.

        Without the first layer x is the residual stream [b, t, hidden_size], without the last layer the result is.
        positions: int64 [t] or [b, t], where the tokens stand in their sequences; 0..t-1 by default. documents: int64
        [b, t], which one of a packed sequence each position belongs to; attention stays inside, None: of one. counted:
        as in `experts.Router`. Raises ModelError where t exceeds the learned positions.
        """
        if not self.training:
            keys = None
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if self.embedding is not None:
            x = self._embed(self.embedding, x, keys, positions)
        rotary = None
        if self.shape.positions == "rotary":
            rotary = rotary_tables(positions, self.shape, x.dtype)
        for number, block in self.blocks().items():
            of_layer = None if keys is None else fold(keys, number + 1)
            x = block(x, Beside(rotary, of_layer, documents, counted))
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x), None if self.embedding is None else self.embedding.weight)
        return logits

    def _embed(self, embedding: nn.Module, tokens: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        x: Tensor = embedding(tokens)
        if self.positions is not None:
            if tokens.shape[1] > self.shape.max_positions:
                raise ModelError(f"{tokens.shape[1]} tokens: the model has {self.shape.max_positions} positions")
            x = x + self.positions(positions)
        return x if keys is None else keyed_dropout(x, self.shape.dropout, keys)

    def blocks(self) -> dict[int, Block]:
        """The layers by number, in order."""
        return {int(number): block for number, block in self.layers.items() if isinstance(block, Block)}


class Head(nn.Module):
    """Logits: one product, with a matrix of its own or, tied, with the table of the embedding beside it."""

    def __init__(self, shape: ModelShape, *, tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.product: Callable[[Tensor, Tensor], Tensor] = vocabulary_product

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Logits [b, t, vocab_size] of normalised x [b, t, hidden_size]; table is the embedding's weight."""
        weight = table if self.weight is None else self.weight
        if weight is None:
            raise ModelError("a tied head without its embedding has no table")
        return self.product(x, weight)


def vocabulary_product(x: Tensor, table: Tensor) -> Tensor:
    """Logits [..., rows] of x [..., hidden_size] and a table [rows, hidden_size].

    A GPU gets a table with rows of nothing up to whole tiles: GPT-2's step with its 50,257 rows takes 1.5 times as long
    without them.
    """
    rows = table.shape[0]
    spare = -rows % VOCABULARY_TILE if x.is_cuda else 0
    if not spare:
        return F.linear(x, table)
    return F.linear(x, F.pad(as_multiplied(table), (0, 0, 0, spare)))[..., :rows]


def _embedding(rows: int, width: int) -> nn.Embedding:
    """A table without values (`model.initial` gives them): drawing them on the meta device imports TorchDynamo."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.dropout = shape.dropout
        self.attention_norm = Norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape)
        feed_forward = SwiGLU if shape.activation == "swiglu" else GELU
        if shape.num_experts:
            shared = feed_forward(shape, shape.shared_expert_size) if shape.shared_expert_size else None
            self.mlp: nn.Module = MixtureOfExperts(shape, shared)
        else:
            self.mlp = feed_forward(shape, shape.ffn_size)

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        """The residual stream [b, t, hidden_size] after this layer."""
        x = x + self._drop(self.attention(self.attention_norm(x), beside), beside.keys, 0)
        normed = self.mlp_norm(x)
        made = self.mlp(normed, beside.counted) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normed)
        return x + self._drop(made, beside.keys, 1)

    def _drop(self, branch: Tensor, keys: Tensor | None, site: int) -> Tensor:
        return branch if keys is None else keyed_dropout(branch, self.dropout, keys, site)


class Attention(nn.Module):
    """Causal self-attention; query heads share key-value heads in runs of num_heads / num_kv_heads.

    The rows of `qkv` are the queries of every head, then the keys, then the values, each head by head: GPT-2's order,
    and Llama's three matrices one below the other. One product measured 8 to 18 % faster than three on CPU.
    """

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, shape.attention_size + 2 * shape.kv_size, bias=shape.bias)
        self.out = nn.Linear(shape.attention_size, shape.hidden_size, bias=shape.bias)
        self.q_norm = Norm(shape, shape.head_dim) if shape.qk_norm else None
        self.k_norm = Norm(shape, shape.head_dim) if shape.qk_norm else None
        self.mix: nn.Module = CausalAttention()

    def forward(self, x: Tensor, beside: Beside) -> Tensor:
        """What attention adds to the residual stream, [b, t, hidden_size]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.heads, self.kv_heads], dim=2)
            qk = torch.cat((_normed(self.q_norm, q), _normed(self.k_norm, k)), dim=2)
        if beside.rotary is not None:
            qk = rotate(qk, beside.rotary)
        q, k = qk.split([self.heads, self.kv_heads], dim=2)
        mixed = self.mix(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), beside.documents)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _normed(norm: Norm, x: Tensor) -> Tensor:
    """In the type of the norm's weight: products under autocast give a narrower one."""
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed.to(x.dtype)


class CausalAttention(nn.Module):
    """What each position takes from those up to it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """[b, heads, t, head_dim] of q of that shape and k, v [b, kv_heads, t, head_dim]; documents int64 [b, t]."""
        return causal_attention(q, k, v, documents)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention of each position to those up to it, in its document; as in `CausalAttention`."""
    grouped = q.shape[1] != k.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    seen = same_document(documents, documents).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


def same_document(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Which queries share a document with which keys, bool [b, 1, t, s], from documents int64 [b, t] and [b, s]."""
    return (of_queries.unsqueeze(-1) == of_keys.unsqueeze(-2)).unsqueeze(1)


class GELU(nn.Module):
    """GPT-2's feed-forward: one product, the tanh form of GELU, one product."""

    def __init__(self, shape: ModelShape, channels: int):
        super().__init__()
        self.up = nn.Linear(shape.hidden_size, channels, bias=shape.bias)
        self.down = nn.Linear(channels, shape.hidden_size, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream, [b, t, hidden_size]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwiGLU(nn.Module):
    """Llama's feed-forward (Shazeer 2020, arXiv 2002.05202). Gate and up fused measured no faster on CPU."""

    def __init__(self, shape: ModelShape, channels: int):
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, channels, bias=shape.bias)
        self.up = nn.Linear(shape.hidden_size, channels, bias=shape.bias)
        self.down = nn.Linear(channels, shape.hidden_size, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream, [b, t, hidden_size]."""
        x = as_multiplied(x)
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def as_multiplied(x: Tensor) -> Tensor:
    """x in the type that autocast would give it for each product: cast once, where several products share it."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # no autocast knows meta tensors
        return x
    return x.to(torch.get_autocast_dtype(kind))


class Norm(nn.Module):
    """LayerNorm (with a bias where the model has biases) or RMSNorm, over the last dimension."""

    def __init__(self, shape: ModelShape, width: int | None = None):
        """`width`: of the last dimension, by default the residual stream's."""
        super().__init__()
        width = shape.hidden_size if width is None else width
        self.eps, self.centred = shape.norm_eps, shape.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.centred and shape.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x [..., width]."""
        if self.centred:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(positions: Tensor, shape: ModelShape, dtype: torch.dtype) -> Rotary:
    """Cosines and sines [..., 1, head_dim / 2] at positions int64 [...] (Su et al. 2021, arXiv 2104.09864).

    fp64 where dtype is fp64, else fp32: in bf16 neighbouring positions would share an angle.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, shape.head_dim, 2, dtype=exact, device=positions.device) / shape.head_dim
    frequencies = shape.rope_theta**-exponent
    if shape.rope_factor > 1:
        frequencies = _stretched(frequencies, shape)
    angles = positions.to(exact)[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def _stretched(frequencies: Tensor, shape: ModelShape) -> Tensor:
    """Long waves slowed down by a factor, short ones as they are, in between in proportion (Llama 3.1's model card)."""
    turns = shape.rope_original * frequencies / (2 * math.pi)  # in the positions that the model knew before
    low, high = shape.rope_low_factor, shape.rope_high_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / shape.rope_factor)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Turn the pair (channel i, channel i + head_dim / 2) of each head of x [b, t, heads, head_dim] by its angle.

    This is Hugging Face's half-split order; Meta's own checkpoints pair neighbouring channels.
    """
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy in nats summed over the targets int64 [b, t] that are not IGNORED, of logits [b, t, vocab_size].

    In fp32, or fp64 where the logits are: a scalar.
    """
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
