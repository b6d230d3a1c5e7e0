"""Bytes of training state a rank holds."""

from __future__ import annotations

from raytrain_hpc.plan.layout import Layout
from raytrain_hpc.shape import ModelShape


def parameters_of_rank(shape: ModelShape, tp: int) -> int:
    """Parameters of the tensor-parallel rank that holds most; with one rank all of them.

    Heads, feed-forward channels and vocabulary rows are shared out; norms, positions, biases of the products that are
    summed, and key-value heads that the ranks do not divide are held whole.
    """

    def held(rank: int) -> int:
        heads, channels, rows = (
            (rank + 1) * total // tp - rank * total // tp
            for total in (shape.num_heads, shape.ffn_size, shape.vocab_size)
        )
        queries = heads * shape.head_dim
        kv = 2 * shape.kv_size // (1 if shape.num_kv_heads % tp else tp)
        ups = 2 if shape.activation == "swiglu" else 1
        layer = (2 * queries + kv + (ups + 1) * channels) * shape.hidden_size + 2 * shape.norm_parameters
        if shape.bias:
            layer += queries + kv + ups * channels + 2 * shape.hidden_size
        tables = rows * (1 if shape.tie_embeddings else 2) + shape.max_positions
        return tables * shape.hidden_size + shape.num_layers * layer + shape.norm_parameters

    return max(held(rank) for rank in range(tp))


def state_bytes(parameters: int, layout: Layout, dtype: str, optimizer: str) -> int:
    """Weights, gradients and optimizer state in bytes, of one rank that has this many `parameters` before ZeRO.

    torch-native mixed precision (weights and gradients kept in fp32, compute copies not counted): 4 + 4 + 8 bytes a
    parameter, of which ZeRO-1 shards the optimizer and keeps full weights beside their shard, ZeRO-2 shards the
    gradients too and ZeRO-3 everything (Rajbhandari et al. 2020, arXiv 1910.02054).
    """
    width = 8 if dtype == "fp64" else 4
    moments = 2 * width if optimizer == "adamw" else 0
    shards = layout.dp_shard
    sharded = moments
    full = 0
    for stage in (2, 3):  # gradients, then weights
        if layout.zero >= stage:
            sharded += width
        else:
            full += width
    if layout.zero in (1, 2) and shards > 1:
        sharded += width  # the sharded weights that the optimizer steps, beside the gathered ones
    return full * parameters + -(-sharded * parameters // shards)
