"""Bytes of training state a rank holds."""

from __future__ import annotations

from raytrain_hpc.plan.layout import Layout
from raytrain_hpc.plan.stages import split_layers
from raytrain_hpc.shape import ModelShape


def parameters_of_rank(shape: ModelShape, layout: Layout, seq_len: int) -> int:
    """Parameters of the rank that holds most, before ZeRO; with one rank all of them.

    Over tp, heads, feed-forward channels and vocabulary rows are shared out; norms, positions, biases of the products
    that are summed, and key-value heads that the ranks do not divide are held whole. Over pp, layers are; the last
    stage of a pipeline has a tied table of its own.
    """
    tp, pipeline = layout.tp, layout.pipeline
    stages = split_layers(shape, seq_len, pipeline.stages)

    def held(rank: int, mine: list[int]) -> int:
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
        first, last = 0 in mine, pipeline.stages - 1 in mine
        tables = (rows + shape.max_positions) * first
        tables += rows * (last and (pipeline.stages > 1 or not shape.tie_embeddings))
        layers = sum(len(stages[stage]) for stage in mine)
        return tables * shape.hidden_size + layers * layer + shape.norm_parameters * last

    ranks = range(pipeline.ranks)
    return max(held(rank, pipeline.stages_of(pp)) for rank in range(tp) for pp in ranks)


def state_bytes(parameters: int, layout: Layout, dtype: str, optimizer: str, offload: str) -> int:
    """Weights, gradients and optimizer state in bytes, of one rank that has this many `parameters` before ZeRO.

    torch-native mixed precision (weights and gradients kept in fp32, compute copies not counted): 4 + 4 + 8 bytes a
    parameter, of which ZeRO-1 shards the optimizer and keeps full weights beside their shard, ZeRO-2 shards the
    gradients too and ZeRO-3 everything (Rajbhandari et al. 2020, arXiv 1910.02054).

    What is counted is the device's memory: moments that are offloaded, to host memory or disk, are not, though a
    device that is a CPU has them in the same memory under offload=cpu. Their copies of a chunk are not counted either.
    """
    width = 8 if dtype == "fp64" else 4
    moments = 2 * width if optimizer == "adamw" and offload == "none" else 0
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
