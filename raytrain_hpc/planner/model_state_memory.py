"""Bytes of training state a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.stage_split import split_layers


@dataclass(frozen=True)
class RankParameters:
    """Parameters that a rank holds before ZeRO shards them: of experts, which can be sharded over fewer ranks, and the
    rest. `unit`: of its largest part that ZeRO-3 gathers as one, a layer or the tables."""

    dense: int
    experts: int
    unit: int


def parameters_of_rank(shape: ModelShape, layout: Layout, seq_len: int) -> RankParameters:
    """Of the rank that holds most; with one rank all of them. See `parameters_by_stage`."""
    return most(parameters_by_stage(shape, layout, seq_len))


def most(held: Iterable[RankParameters]) -> RankParameters:
    """The largest of them."""
    return max(held, key=lambda of_rank: of_rank.dense + of_rank.experts)


def parameters_by_stage(shape: ModelShape, layout: Layout, seq_len: int) -> list[RankParameters]:
    """Of a rank of each pipeline coordinate, the one with most; with one rank all of them.

    Over tp, heads, feed-forward channels and vocabulary rows are shared out; norms, positions, routers, biases of the
    products that are summed, and key-value heads that the ranks do not divide are held whole. Over ep, experts are.
    Over pp, layers are; the last stage of a pipeline has a tied table of its own.
    """
    pipeline = layout.pipeline
    stages = split_layers(shape, seq_len, pipeline.stages)
    per_layer = max(_layer_of_rank(shape, layout.tp, rank) for rank in range(layout.tp))
    of_experts = _largest_share(shape.num_experts, layout.ep) * _largest_share(shape.ffn_size, layout.tp)
    of_experts *= shape.feed_forward_matrices * shape.hidden_size
    held = []
    for pp in range(pipeline.ranks):
        mine = pipeline.stages_of(pp)
        layers = sum(len(stages[stage]) for stage in mine)
        tables = _tables_of_rank(shape, layout.tp, 0 in mine, pipeline.stages - 1 in mine, pipeline.stages)
        unit = max(per_layer + of_experts, tables)
        held.append(RankParameters(layers * per_layer + tables, layers * of_experts, unit))
    return held


def _layer_of_rank(shape: ModelShape, tp: int, rank: int) -> int:
    """Parameters of a layer but for its experts."""

    def share(total: int) -> int:
        return (rank + 1) * total // tp - rank * total // tp

    queries = share(shape.num_heads) * shape.head_dim
    channels = share(shape.shared_expert_size if shape.num_experts else shape.ffn_size)
    kv = 2 * shape.kv_size // (1 if shape.num_kv_heads % tp else tp)
    matrices = shape.feed_forward_matrices
    rows = 2 * queries + kv + matrices * channels + shape.num_experts
    layer = rows * shape.hidden_size + 2 * shape.norm_parameters + shape.head_norm_parameters
    if shape.bias:
        layer += queries + kv + shape.hidden_size
        if shape.shared_expert_size or not shape.num_experts:
            layer += (matrices - 1) * channels + shape.hidden_size
    return layer


def _tables_of_rank(shape: ModelShape, tp: int, first: bool, last: bool, stages: int) -> int:
    """Embedding, positions, head and last norm, as far as a rank has the first or the last stage."""
    rows = _largest_share(shape.vocab_size, tp)
    tables = (rows + shape.max_positions) * first + rows * (last and (stages > 1 or not shape.tie_embeddings))
    return tables * shape.hidden_size + shape.norm_parameters * last


def _largest_share(total: int, ranks: int) -> int:
    return -(-total // ranks)


def state_bytes(parameters: RankParameters, layout: Layout, dtype: str, optimizer: str, offload: str = "none") -> int:
    """Weights, gradients and optimizer state in bytes, of one rank that has these `parameters` before ZeRO.

    torch-native mixed precision (weights and gradients kept in fp32, compute copies not counted): 4 + 4 + 8 bytes a
    parameter, of which ZeRO-1 shards the optimizer and keeps full weights beside their shard, ZeRO-2 shards the
    gradients too and ZeRO-3 everything (Rajbhandari et al. 2020, arXiv 1910.02054). In a pipeline ZeRO-1 is the same.

    What is counted is the device's memory: moments that are offloaded, to host memory or disk, are not, though a
    device that is a CPU has them in the same memory under offload=cpu. Their copies of a chunk are not counted either.
    """
    moments = 2 if optimizer == "adamw" and offload == "none" else 0
    expert_shards = layout.expert_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    dense = _bytes(parameters.dense, layout.zero if layout.dp_shard > 1 else 0, layout.dp_shard, dtype, moments)
    return dense + _bytes(parameters.experts, layout.zero if expert_shards > 1 else 0, expert_shards, dtype, moments)


def _bytes(parameters: int, zero: int, shards: int, dtype: str, moments: int) -> int:
    width = 8 if dtype == "fp64" else 4
    sharded = moments * width
    full = 0
    for stage in (2, 3):  # gradients, then weights
        if zero >= stage:
            sharded += width
        else:
            full += width
    if zero in (1, 2):
        sharded += width  # the sharded weights that the optimizer steps, beside the gathered ones
    return full * parameters + -(-sharded * parameters // shards)
