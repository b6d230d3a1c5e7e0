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

from raytrain_hpc.config.model_spec import VOCAB_SIZE_MULTIPLE, ModelSpec
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.state.keyed_rng import fold_in, keyed_dropout

IGNORE_INDEX = -100  # a target that is no part of the loss

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each [t, 1, head_dim / 2], or [b, t, 1, head_dim / 2]


@dataclass(frozen=True)
class BlockContext:
    """What a block needs beside the residual stream. Plain to wrappers, which cast the tensors of tuples."""

    rotary: RotaryTables | None = None
    dropout_keys: Tensor | None = None  # this layer's own, int64 [b, t]
    documents: Tensor | None = None  # of whole sequences, int64 [b, t]
    loss_weight: float = 1.0


class Decoder(nn.Module):
    """Tokens to logits, or a run of the layers on the way. Dropout happens in training mode, where keys are given."""

    def __init__(self, spec: ModelSpec, layers: range | None = None):
        """`layers`: those that it has, by default all; the first comes with the embedding, the last with the head."""
        super().__init__()
        self.spec = spec
        layers = range(spec.num_layers) if layers is None else layers
        first, last = layers.start == 0, layers.stop == spec.num_layers
        learned = first and spec.positions == "learned"
        self.embedding = _make_embedding(spec.vocab_size, spec.hidden_size) if first else None
        self.positions = _make_embedding(spec.max_positions, spec.hidden_size) if learned else None
        self.layers = nn.ModuleDict({str(number): Block(spec) for number in layers})
        self.norm = Norm(spec) if last else None
        self.head = Head(spec, tied=first and spec.tie_embeddings) if last else None

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        loss_weight: float = 1.0,
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
        if self.spec.positions == "rotary":
            rotary = make_rotary_tables(positions, self.spec, x.dtype)
        for number, block in self.blocks().items():
            of_layer = None if keys is None else fold_in(keys, number + 1)
            x = block(x, BlockContext(rotary, of_layer, documents, loss_weight))
        if self.norm is None or self.head is None:
            return x
        logits: Tensor = self.head(self.norm(x), None if self.embedding is None else self.embedding.weight)
        return logits

    def _embed(self, embedding: nn.Module, tokens: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        x: Tensor = embedding(tokens)
        if self.positions is not None:
            if tokens.shape[1] > self.spec.max_positions:
                raise ModelError(f"{tokens.shape[1]} tokens: the model has {self.spec.max_positions} positions")
            x = x + self.positions(positions)
        return x if keys is None else keyed_dropout(x, self.spec.dropout, keys)

    def blocks(self) -> dict[int, Block]:
        """The layers by number, in order."""
        return {int(number): block for number, block in self.layers.items() if isinstance(block, Block)}


class Head(nn.Module):
    """Logits: one product, with a matrix of its own or, tied, with the table of the embedding beside it."""

    def __init__(self, spec: ModelSpec, *, tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.product: Callable[[Tensor, Tensor], Tensor] = compute_logits

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Logits [b, t, vocab_size] of normalised x [b, t, hidden_size]; table is the embedding's weight."""
        weight = table if self.weight is None else self.weight
        if weight is None:
            raise ModelError("a tied head without its embedding has no table")
        return self.product(x, weight)


def compute_logits(x: Tensor, table: Tensor) -> Tensor:
    """Logits [..., rows] of x [..., hidden_size] and a table [rows, hidden_size].

    A GPU gets a table with rows of nothing up to whole tiles: GPT-2's step with its 50,257 rows takes 1.5 times as long
    without them.
    """
    rows = table.shape[0]
    spare = -rows % VOCAB_SIZE_MULTIPLE if x.is_cuda else 0
    if not spare:
        return F.linear(x, table)
    return F.linear(x, F.pad(cast_for_autocast(table), (0, 0, 0, spare)))[..., :rows]


def _make_embedding(rows: int, width: int) -> nn.Embedding:
    """A table without values (`model.initial` gives them): drawing them on the meta device imports TorchDynamo."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.dropout = spec.dropout
        self.attention_norm = Norm(spec)
        self.attention = Attention(spec)
        self.mlp_norm = Norm(spec)
        feed_forward = SwiGLU if spec.activation == "swiglu" else GELU
        if spec.num_experts:
            shared = feed_forward(spec, spec.shared_expert_size) if spec.shared_expert_size else None
            self.mlp: nn.Module = MixtureOfExperts(spec, shared)
        else:
            self.mlp = feed_forward(spec, spec.ffn_size)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """The residual stream [b, t, hidden_size] after this layer."""
        x = x + self._dropout(self.attention(self.attention_norm(x), context), context.dropout_keys, 0)
        normed = self.mlp_norm(x)
        made = self.mlp(normed, context.loss_weight) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normed)
        return x + self._dropout(made, context.dropout_keys, 1)

    def _dropout(self, branch: Tensor, keys: Tensor | None, site: int) -> Tensor:
        return branch if keys is None else keyed_dropout(branch, self.dropout, keys, site)


class Attention(nn.Module):
    """Causal self-attention; query heads share key-value heads in runs of num_heads / num_kv_heads.

    The rows of `qkv` are the queries of every head, then the keys, then the values, each head by head: GPT-2's order,
    and Llama's three matrices one below the other. One product measured 8 to 18 % faster than three on CPU.
    """

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = nn.Linear(spec.hidden_size, spec.attention_size + 2 * spec.kv_size, bias=spec.bias)
        self.out = nn.Linear(spec.attention_size, spec.hidden_size, bias=spec.bias)
        self.q_norm = Norm(spec, spec.head_dim) if spec.qk_norm else None
        self.k_norm = Norm(spec, spec.head_dim) if spec.qk_norm else None
        self.core_attention: nn.Module = CausalAttention()

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """What attention adds to the residual stream, [b, t, hidden_size]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        qk, v = heads.split([self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([self.num_heads, self.num_kv_heads], dim=2)
            qk = torch.cat((_apply_norm(self.q_norm, q), _apply_norm(self.k_norm, k)), dim=2)
        if context.rotary is not None:
            qk = apply_rotary(qk, context.rotary)
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=2)
        mixed = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.documents)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def _apply_norm(norm: Norm, x: Tensor) -> Tensor:
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
    seen = make_document_mask(documents, documents).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=grouped)


def make_document_mask(query_documents: Tensor, key_documents: Tensor) -> Tensor:
    """Which queries share a document with which keys, bool [b, 1, t, s], from documents int64 [b, t] and [b, s]."""
    return (query_documents.unsqueeze(-1) == key_documents.unsqueeze(-2)).unsqueeze(1)


class GELU(nn.Module):
    """GPT-2's feed-forward: one product, the tanh form of GELU, one product."""

    def __init__(self, spec: ModelSpec, ffn_size: int):
        super().__init__()
        self.up = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.down = nn.Linear(ffn_size, spec.hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream, [b, t, hidden_size]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


class SwiGLU(nn.Module):
    """Llama's feed-forward (Shazeer 2020, arXiv 2002.05202). Gate and up fused measured no faster on CPU."""

    def __init__(self, spec: ModelSpec, ffn_size: int):
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.up = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.down = nn.Linear(ffn_size, spec.hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """What the feed-forward adds to the residual stream, [b, t, hidden_size]."""
        x = cast_for_autocast(x)
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def cast_for_autocast(x: Tensor) -> Tensor:
    """x in the type that autocast would give it for each product: cast once, where several products share it."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # no autocast knows meta tensors
        return x
    return x.to(torch.get_autocast_dtype(kind))


class Norm(nn.Module):
    """LayerNorm (with a bias where the model has biases) or RMSNorm, over the last dimension."""

    def __init__(self, spec: ModelSpec, width: int | None = None):
        """`width`: of the last dimension, by default the residual stream's."""
        super().__init__()
        width = spec.hidden_size if width is None else width
        self.eps, self.is_layernorm = spec.norm_eps, spec.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.is_layernorm and spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x [..., width]."""
        if self.is_layernorm:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def make_rotary_tables(positions: Tensor, spec: ModelSpec, dtype: torch.dtype) -> RotaryTables:
    """Cosines and sines [..., 1, head_dim / 2] at positions int64 [...] (Su et al. 2021, arXiv 2104.09864).

    fp64 where dtype is fp64, else fp32: in bf16 neighbouring positions would share an angle.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, spec.head_dim, 2, dtype=exact, device=positions.device) / spec.head_dim
    frequencies = spec.rope_theta**-exponent
    if spec.rope_factor > 1:
        frequencies = _scale_frequencies(frequencies, spec)
    angles = positions.to(exact)[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def _scale_frequencies(frequencies: Tensor, spec: ModelSpec) -> Tensor:
    """Long waves slowed down by a factor, short ones as they are, in between in proportion (Llama 3.1's model card)."""
    turns = spec.rope_original * frequencies / (2 * math.pi)  # in the positions that the model knew before
    low, high = spec.rope_low_factor, spec.rope_high_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / spec.rope_factor)


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
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
    return F.cross_entropy(exact.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
