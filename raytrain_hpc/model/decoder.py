"""Decoder-only transformer: GPT-2, Llama and combinations of the two, without parallelism.

The forward of a block uses only its own parameters, that of the root module only the root's, and only routers have
buffers. Blocks can therefore be compiled, recomputed, sharded or built on the meta device one by one.
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
from raytrain_hpc.model.autocast import cast_for_autocast
from raytrain_hpc.model.cross_entropy import IGNORE_INDEX, ChunkedLoss
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.state.keyed_rng import fold_in, keyed_dropout
from raytrain_hpc.torch_device import is_on_accelerator

RotaryTables = tuple[Tensor, Tensor]  # cosines and sines, each [t, 1, head_dim / 2] or [b, t, 1, head_dim / 2]


@dataclass(frozen=True)
class BlockContext:
    """Inputs of a block other than the residual stream."""

    rotary: RotaryTables | None = None
    dropout_keys: Tensor | None = None  # of this layer, int64 [b, t]
    documents: Tensor | None = None  # of full sequences, int64 [b, seq_len]
    counted: Tensor | None = None  # of the positions that a router sees, bool [b, t]


class Decoder(nn.Module):
    """A decoder-only transformer, or a range of its layers. Dropout is applied in training mode if keys are given."""

    def __init__(self, spec: ModelSpec, layers: range | None = None):
        """`layers`: default: all. The first includes the embedding, the last one the final norm and the head."""
        super().__init__()
        self.spec = spec
        self.residual_dtype: torch.dtype | None = None  # of the residual stream; None: that of the embedding
        layers = range(spec.num_layers) if layers is None else layers
        has_embedding, has_head = layers.start == 0, layers.stop == spec.num_layers
        has_positions = has_embedding and spec.position_embedding == "learned"
        self.embedding = _make_embedding(spec.vocab_size, spec.hidden_size) if has_embedding else None
        self.positions = _make_embedding(spec.max_positions, spec.hidden_size) if has_positions else None
        self.layers = nn.ModuleDict({str(layer): Block(spec) for layer in layers})
        self.norm = Norm(spec) if has_head else None
        self.head = Head(spec, tied=has_embedding and spec.tie_embeddings) if has_head else None

    def forward(
        self,
        x: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        documents: Tensor | None = None,
        counted: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [b, t, vocab_size] of tokens x, int64 [b, t].

        Without the first layer, x is the residual stream [b, t, hidden_size]; without the last layer, the result is.
        keys: int64 [b, t] from `state.keyed_rng.derive_position_keys`, None: no dropout. positions: int64 [t] or [b,
        t], in the sequence; default: 0..t-1. documents: int64 [b, seq_len], index of the document within a packed
        sequence; attention is restricted to documents. None: one document per sequence. counted: see `moe.Router`.
        targets: int64 [b, t]; with them, the result is the sum of losses if `head.chunked_loss` is set. Raises
        ModelError if t exceeds the number of learned positions.
        """
        if not self.training:
            keys = None
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        if self.embedding is not None:
            x = self._embed(self.embedding, x, keys, positions)
        rotary = None
        if self.spec.position_embedding == "rotary":
            rotary = make_rotary_tables(positions, self.spec, x.dtype)
        for layer, block in self.blocks().items():
            layer_keys = None if keys is None else fold_in(keys, layer + 1)
            x = block(x, BlockContext(rotary, layer_keys, documents, counted))
        if self.norm is None or self.head is None:
            return x
        table = None if self.embedding is None else self.embedding.weight
        output: Tensor = self.head(self.norm(x), table, targets)
        return output

    def _embed(self, embedding: nn.Module, tokens: Tensor, keys: Tensor | None, positions: Tensor) -> Tensor:
        x: Tensor = embedding(tokens)
        if self.positions is not None:
            if tokens.shape[1] > self.spec.max_positions:
                raise ModelError(f"{tokens.shape[1]} tokens: the model has {self.spec.max_positions} positions")
            x = x + self.positions(positions)
        if self.residual_dtype is not None:
            x = x.to(self.residual_dtype)
        return x if keys is None else keyed_dropout(x, self.spec.dropout, keys)

    def blocks(self) -> dict[int, Block]:
        """Return the blocks by layer number, in order."""
        return {int(layer): block for layer, block in self.layers.items() if isinstance(block, Block)}


class Head(nn.Module):
    """The output projection to logits, with a weight of its own or, if tied, the embedding table."""

    def __init__(self, spec: ModelSpec, *, tied: bool):
        super().__init__()
        self.weight = None if tied else nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))
        self.product: Callable[[Tensor, Tensor], Tensor] = compute_logits
        self.chunked_loss: ChunkedLoss | None = None  # computes the loss from x; None: the head returns logits

    def forward(self, x: Tensor, table: Tensor | None, targets: Tensor | None = None) -> Tensor:
        """Return logits [b, t, vocab_size] of normalized x [b, t, hidden_size]. table: the embedding, if tied.

        targets: int64 [b, t]; with them and `chunked_loss`, return the sum of losses instead, a scalar.
        """
        weight = table if self.weight is None else self.weight
        if weight is None:
            raise ModelError("a tied head needs the embedding table")
        if targets is None or self.chunked_loss is None:
            return self.product(x, weight)
        return self.chunked_loss(x, weight, targets)


def compute_logits(x: Tensor, table: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Compute logits [..., rows] of x [..., hidden_size] and table [rows, hidden_size].

    On a GPU the table is padded with zero rows to a multiple of VOCAB_SIZE_MULTIPLE. Without padding, a GPT-2 step with
    50,257 rows takes 1.5 times as long. `product`: computes the logits; default: `F.linear`.
    """
    product = F.linear if product is None else product
    rows = table.shape[0]
    padding = -rows % VOCAB_SIZE_MULTIPLE if is_on_accelerator(x) else 0
    if not padding:
        return product(x, table)
    return product(x, F.pad(cast_for_autocast(table), (0, 0, 0, padding)))[..., :rows]


def _make_embedding(rows: int, width: int) -> nn.Embedding:
    """Create an uninitialized table: initializing it on the meta device would import TorchDynamo."""
    embedding: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)  # type: ignore[no-untyped-call]
    return embedding


class Block(nn.Module):
    """One pre-norm transformer layer: attention and feed-forward, both with a residual connection."""

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
        """Return the residual stream [b, t, hidden_size] after this layer."""
        x = x + self._dropout(self.attention(self.attention_norm(x), context), context.dropout_keys, 0)
        normalized = self.mlp_norm(x)
        output = (
            self.mlp(normalized, context.counted) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(normalized)
        )
        return x + self._dropout(output, context.dropout_keys, 1)

    def _dropout(self, branch: Tensor, keys: Tensor | None, site: int) -> Tensor:
        return branch if keys is None else keyed_dropout(branch, self.dropout, keys, site)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads: num_heads / num_kv_heads query heads share one.

    The rows of `qkv` are queries, keys and values, each by head: the order of GPT-2, and of Llama's three matrices
    concatenated. On CPU one product measured 8 to 18 % faster than three.
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
        """Return the output of attention, [b, t, hidden_size]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        if context.rotary is None:
            q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=2)
            q, k = self._normalize(q, k)
        else:  # rotate queries and keys together
            qk, v = torch.split(heads, [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2)
            if self.q_norm is not None:
                qk = torch.cat(self._normalize(*torch.split(qk, [self.num_heads, self.num_kv_heads], dim=2)), dim=2)
            rotated = apply_rotary(qk, context.rotary)
            q, k = torch.split(rotated, [self.num_heads, self.num_kv_heads], dim=2)
        attended = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), context.documents)
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return _apply_norm(self.q_norm, q), _apply_norm(self.k_norm, k)


def _apply_norm(norm: Norm, x: Tensor) -> Tensor:
    """Normalize x in the dtype of the norm's weight: products under autocast return a narrower one."""
    normalized: Tensor = norm(x.to(norm.weight.dtype))
    return normalized.to(x.dtype)


class CausalAttention(nn.Module):
    """Causal attention over the local positions. Context parallelism replaces this module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        """Return the output [b, heads, t, head_dim]; see `causal_attention`."""
        return causal_attention(q, k, v, documents)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
    """Compute causal scaled dot-product attention, restricted to documents if given: [b, heads, t, head_dim].

    q: [b, heads, t, head_dim]; k, v: [b, kv_heads, t, head_dim]; documents: int64 [b, t].
    """
    is_grouped = q.shape[1] != k.shape[1]
    if documents is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    mask = make_document_mask(documents, documents).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)


def make_document_mask(query_documents: Tensor, key_documents: Tensor) -> Tensor:
    """Return a mask, bool [b, 1, t, s]: query and key are in the same document. Inputs: int64 [b, t] and [b, s]."""
    return (query_documents.unsqueeze(-1) == key_documents.unsqueeze(-2)).unsqueeze(1)


class GELU(nn.Module):
    """The feed-forward network of GPT-2, with the tanh approximation of GELU or the exact one."""

    def __init__(self, spec: ModelSpec, ffn_size: int):
        super().__init__()
        self.approximate = spec.gelu_approximation
        self.up = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.down = nn.Linear(ffn_size, spec.hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward network, [b, t, hidden_size]."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate=self.approximate))
        return out


class SwiGLU(nn.Module):
    """The feed-forward network of Llama (Shazeer 2020, arXiv 2002.05202).

    One product for the gate and up projections measured no faster on a CPU, and 1.4 % slower per step on an H200.
    """

    def __init__(self, spec: ModelSpec, ffn_size: int):
        super().__init__()
        self.gate = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.up = nn.Linear(spec.hidden_size, ffn_size, bias=spec.bias)
        self.down = nn.Linear(ffn_size, spec.hidden_size, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the feed-forward network, [b, t, hidden_size]."""
        x = cast_for_autocast(x)
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Norm(nn.Module):
    """LayerNorm (with a bias if the model has biases) or RMSNorm, over the last dimension."""

    def __init__(self, spec: ModelSpec, width: int | None = None):
        """`width`: size of the last dimension; default: hidden_size."""
        super().__init__()
        width = spec.hidden_size if width is None else width
        self.eps, self.is_layernorm = spec.norm_eps, spec.norm == "layernorm"
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if self.is_layernorm and spec.bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., width]."""
        weight = self.weight.to(x.dtype)  # kernels compute in fp32, but need operands of one dtype
        if not self.is_layernorm:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def make_rotary_tables(positions: Tensor, spec: ModelSpec, dtype: torch.dtype) -> RotaryTables:
    """Compute cosines and sines [..., 1, head_dim / 2] at positions int64 [...] (Su et al. 2021, arXiv 2104.09864).

    Tables are fp64 if `dtype` is, else fp32: in bf16, neighboring positions would have the same angle.
    """
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, spec.head_dim, 2, dtype=table_dtype, device=positions.device) / spec.head_dim
    frequencies = spec.rope_theta**-exponent
    if spec.rope_factor > 1:
        frequencies = _scale_frequencies(frequencies, spec)
    angles = positions.to(table_dtype)[..., None, None] * frequencies
    return angles.cos(), angles.sin()


def _scale_frequencies(frequencies: Tensor, spec: ModelSpec) -> Tensor:
    """Divide low rotary frequencies by rope_factor, keep high ones, and interpolate between (Llama 3.1 model card)."""
    rotations = (
        spec.rope_original_max_positions * frequencies / (2 * math.pi)
    )  # rotations within the original context length
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    weight = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (weight + (1 - weight) / spec.rope_factor)


def apply_rotary(x: Tensor, rotary: RotaryTables) -> Tensor:
    """Rotate the channel pairs (i, i + head_dim / 2) of each head of x [b, t, heads, head_dim].

    This is the half-split order of Hugging Face; checkpoints of Meta pair neighboring channels.
    """
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy in nats, summed over targets other than IGNORE_INDEX: a scalar.

    logits: [b, t, vocab_size]; targets: int64 [b, t]. Computed in fp64 if the logits are fp64, else in fp32.
    """
    wide_logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide_logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
