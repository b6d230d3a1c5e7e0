"""Model state memory: parameters per rank, and bytes of weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.planner.workload import Workload


@dataclass(frozen=True)
class RankParameters:
    """Parameter counts of a rank before ZeRO shards them.

    `experts`: parameters of experts, which may be sharded over fewer ranks; `dense`: all others. `largest_unit`: the
    largest unit that ZeRO-3 gathers at once, a layer or the embedding tables.
    """

    dense: int
    experts: int
    largest_unit: int


def count_max_rank_parameters(spec: ModelSpec, layout: Layout, seq_len: int) -> RankParameters:
    """Count the parameters of the rank that holds the most. See `count_parameters_by_pp_rank`."""
    return get_largest(count_parameters_by_pp_rank(spec, layout, seq_len))


def get_largest(parameters_by_rank: Iterable[RankParameters]) -> RankParameters:
    """Return the counts of the rank with the most parameters."""
    return max(parameters_by_rank, key=lambda rank_parameters: rank_parameters.dense + rank_parameters.experts)


def count_parameters_by_pp_rank(spec: ModelSpec, layout: Layout, seq_len: int) -> list[RankParameters]:
    """Count the parameters per pipeline rank, for the tensor-parallel rank that holds the most.

    Over tp, heads, feed-forward channels and vocabulary rows are split. Norms, position embeddings, routers, biases
    after row-parallel products, and key-value heads that tp does not divide are replicated. Over ep, experts are split.
    Over pp, layers are split, and the last stage has its own copy of a tied table.
    """
    pipeline = layout.pipeline
    stages = split_layers(spec, seq_len, pipeline.num_stages)
    layer_parameters = max(_count_layer_parameters(spec, layout.tp, rank) for rank in range(layout.tp))
    expert_parameters = _ceil_div(spec.num_experts, layout.ep) * _ceil_div(spec.ffn_size, layout.tp)
    expert_parameters *= spec.num_ffn_matrices * spec.hidden_size
    counts = []
    for pp_rank in range(pipeline.num_ranks):
        own_stages = pipeline.get_stages_of_rank(pp_rank)
        layers = sum(len(stages[stage]) for stage in own_stages)
        tables = _count_table_parameters(
            spec, layout.tp, 0 in own_stages, pipeline.num_stages - 1 in own_stages, pipeline.num_stages
        )
        largest_unit = max(layer_parameters + expert_parameters, tables)
        counts.append(RankParameters(layers * layer_parameters + tables, layers * expert_parameters, largest_unit))
    return counts


def _count_layer_parameters(spec: ModelSpec, tp: int, rank: int) -> int:
    """Count the parameters of a layer without its experts."""

    def count_local(total: int) -> int:
        return (rank + 1) * total // tp - rank * total // tp

    queries = count_local(spec.num_heads) * spec.head_dim
    channels = count_local(spec.shared_expert_size if spec.num_experts else spec.ffn_size)
    kv = 2 * spec.kv_size // (1 if spec.num_kv_heads % tp else tp)
    matrices = spec.num_ffn_matrices
    rows = 2 * queries + kv + matrices * channels + spec.num_experts
    layer = rows * spec.hidden_size + 2 * spec.num_norm_parameters + spec.num_qk_norm_parameters
    if spec.bias:
        layer += queries + kv + spec.hidden_size
        if spec.shared_expert_size or not spec.num_experts:
            layer += (matrices - 1) * channels + spec.hidden_size
    return layer


def _count_table_parameters(spec: ModelSpec, tp: int, first: bool, last: bool, stages: int) -> int:
    """Count embedding, position embedding, head and last norm, for a rank with the first or the last stage."""
    rows = _ceil_div(spec.vocab_size, tp)
    tables = (rows + spec.max_positions) * first + rows * (last and (stages > 1 or not spec.tie_embeddings))
    return tables * spec.hidden_size + spec.num_norm_parameters * last


def _ceil_div(total: int, ranks: int) -> int:
    return -(-total // ranks)


def compute_state_bytes(parameters: RankParameters, layout: Layout, workload: Workload, offload: str = "none") -> int:
    """Return the bytes of weights, gradients and optimizer state of a rank with these `parameters` before ZeRO.

    PyTorch mixed precision keeps weights and gradients in fp32: 4 + 4 + 8 bytes per parameter, without compute copies.
    ZeRO-1 shards the optimizer state and keeps the full weights in addition to their shard. ZeRO-2 also shards
    gradients, and ZeRO-3 shards everything (Rajbhandari et al. 2020, arXiv 1910.02054).

    Only device memory counts: offloaded moments are excluded, although a CPU device has them in the same memory under
    offload=cpu. Staging buffers for offloaded chunks are not counted either. Muon counts with two moments, which is an
    upper bound: it keeps one per matrix.
    """
    itemsize, moments_itemsize = workload.state_itemsize, workload.moments_itemsize if offload == "none" else 0
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    shares = ((parameters.dense, layout.dp_shard), (parameters.experts, expert_shards))
    return sum(
        _compute_bytes(count, layout.zero if shards > 1 else 0, shards, itemsize, moments_itemsize)
        for count, shards in shares
    )


def _compute_bytes(parameters: int, zero: int, shards: int, itemsize: int, moments_itemsize: int) -> int:
    sharded, full = moments_itemsize, 0
    for stage in (2, 3):  # gradients, then weights
        if zero >= stage:
            sharded += itemsize
        else:
            full += itemsize
    if zero in (1, 2):
        sharded += itemsize  # the weight shard that the optimizer updates, in addition to the gathered weights
    return full * parameters + -(-sharded * parameters // shards)
