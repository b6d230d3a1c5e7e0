"""Bytes of training state a rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.stage_split import split_layers


@dataclass(frozen=True)
class RankParameters:
    """Parameters that a rank holds before ZeRO shards them: of experts, which can be sharded over fewer ranks, and the
    rest. `unit`: of its largest part that ZeRO-3 gathers as one, a layer or the tables."""

    dense: int
    experts: int
    largest_unit: int


def count_max_rank_parameters(shape: ModelSpec, layout: Layout, seq_len: int) -> RankParameters:
    """Of the rank that holds most; with one rank all of them. See `parameters_by_stage`."""
    return get_largest(count_parameters_by_pp_rank(shape, layout, seq_len))


def get_largest(parameters_by_rank: Iterable[RankParameters]) -> RankParameters:
    """The largest of them."""
    return max(parameters_by_rank, key=lambda of_rank: of_rank.dense + of_rank.experts)


def count_parameters_by_pp_rank(shape: ModelSpec, layout: Layout, seq_len: int) -> list[RankParameters]:
    """Of a rank of each pipeline coordinate, the one with most; with one rank all of them.

    Over tp, heads, feed-forward channels and vocabulary rows are shared out; norms, positions, routers, biases of the
    products that are summed, and key-value heads that the ranks do not divide are held whole. Over ep, experts are.
    Over pp, layers are; the last stage of a pipeline has a tied table of its own.
    """
    pipeline = layout.pipeline
    stages = split_layers(shape, seq_len, pipeline.num_stages)
    per_layer = max(_count_layer_parameters(shape, layout.tp, rank) for rank in range(layout.tp))
    of_experts = _ceil_div(shape.num_experts, layout.ep) * _ceil_div(shape.ffn_size, layout.tp)
    of_experts *= shape.num_ffn_matrices * shape.hidden_size
    held = []
    for pp in range(pipeline.num_ranks):
        mine = pipeline.get_stages_of_rank(pp)
        layers = sum(len(stages[stage]) for stage in mine)
        tables = _count_table_parameters(
            shape, layout.tp, 0 in mine, pipeline.num_stages - 1 in mine, pipeline.num_stages
        )
        unit = max(per_layer + of_experts, tables)
        held.append(RankParameters(layers * per_layer + tables, layers * of_experts, unit))
    return held


def _count_layer_parameters(shape: ModelSpec, tp: int, rank: int) -> int:
    """Parameters of a layer but for its experts."""

    def share(total: int) -> int:
        return (rank + 1) * total // tp - rank * total // tp

    queries = share(shape.num_heads) * shape.head_dim
    channels = share(shape.shared_expert_size if shape.num_experts else shape.ffn_size)
    kv = 2 * shape.kv_size // (1 if shape.num_kv_heads % tp else tp)
    matrices = shape.num_ffn_matrices
    rows = 2 * queries + kv + matrices * channels + shape.num_experts
    layer = rows * shape.hidden_size + 2 * shape.num_norm_parameters + shape.num_qk_norm_parameters
    if shape.bias:
        layer += queries + kv + shape.hidden_size
        if shape.shared_expert_size or not shape.num_experts:
            layer += (matrices - 1) * channels + shape.hidden_size
    return layer


def _count_table_parameters(shape: ModelSpec, tp: int, first: bool, last: bool, stages: int) -> int:
    """Embedding, positions, head and last norm, as far as a rank has the first or the last stage."""
    rows = _ceil_div(shape.vocab_size, tp)
    tables = (rows + shape.max_positions) * first + rows * (last and (stages > 1 or not shape.tie_embeddings))
    return tables * shape.hidden_size + shape.num_norm_parameters * last


def _ceil_div(total: int, ranks: int) -> int:
    return -(-total // ranks)


def compute_state_bytes(
    parameters: RankParameters, layout: Layout, dtype: str, optimizer: str, offload: str = "none"
) -> int:
    """Weights, gradients and optimizer state in bytes, of one rank that has these `parameters` before ZeRO.

    torch-native mixed precision (weights and gradients kept in fp32, compute copies not counted): 4 + 4 + 8 bytes a
    parameter, of which ZeRO-1 shards the optimizer and keeps full weights beside their shard, ZeRO-2 shards the
    gradients too and ZeRO-3 everything (Rajbhandari et al. 2020, arXiv 1910.02054). In a pipeline ZeRO-1 is the same.

    What is counted is the device's memory: moments that are offloaded, to host memory or disk, are not, though a
    device that is a CPU has them in the same memory under offload=cpu. Their copies of a chunk are not counted either.
    """
    moments = 2 if optimizer == "adamw" and offload == "none" else 0
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    dense = _compute_bytes(parameters.dense, layout.zero if layout.dp_shard > 1 else 0, layout.dp_shard, dtype, moments)
    return dense + _compute_bytes(
        parameters.experts, layout.zero if expert_shards > 1 else 0, expert_shards, dtype, moments
    )


def _compute_bytes(parameters: int, zero: int, shards: int, dtype: str, moments: int) -> int:
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
