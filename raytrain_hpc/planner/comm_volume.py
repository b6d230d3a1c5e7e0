"""Communication volume: bytes that a rank sends per step, by collective and by mesh axis."""

from __future__ import annotations

from raytrain_hpc.planner.layout import EP_FOLDED_AXES, Batching, Layout
from raytrain_hpc.planner.model_state_memory import count_max_rank_parameters
from raytrain_hpc.planner.workload import Workload

TP_COLLECTIVES_PER_LAYER_PASS = 4  # per layer and pass: gathered before two products, scattered after two
EP_ALL_TO_ALLS_PER_LAYER = 4  # per layer: dispatch and combine, in both passes


def compute_tp_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """Return the bytes that a rank sends in one tensor-parallel collective over the residual stream."""
    return tokens * workload.spec.hidden_size * workload.compute_itemsize * (tp - 1) / tp


def compute_ulysses_bytes(workload: Workload, tokens: float, tp: int, ulysses: int) -> float:
    """Return the bytes of one pass: queries, keys, values and outputs exchanged between positions and heads."""
    rows = 2 * (workload.spec.attention_size + workload.spec.kv_size) / tp
    return tokens * rows * workload.compute_itemsize * (ulysses - 1) / ulysses


def compute_ring_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """Return the bytes of the keys and values of a rank's tokens, sent to the next rank of the ring."""
    return tokens * 2 * workload.spec.kv_size / tp * workload.compute_itemsize


def compute_ep_bytes(workload: Workload, tokens: float, tp: int, ep: int) -> float:
    """Return the bytes that a rank sends in one all-to-all to the ranks of the experts, under uniform routing."""
    routed = tokens * workload.spec.experts_per_token * workload.spec.hidden_size / tp
    return routed * workload.compute_itemsize * (ep - 1) / ep


def compute_pp_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """Return the bytes of a microbatch's residual stream, or of its gradient, sent between two stages."""
    return tokens * workload.spec.hidden_size / tp * workload.compute_itemsize


def compute_gathered_bytes(workload: Workload, dense_parameters: int, tp: int) -> float:
    """Return the bytes of a rank's dense parameters as ZeRO all-gathers them: those of float8 products take one each.

    The rank is taken to have the embedding, and the head if that has weights of its own, in bf16.
    """
    if workload.dtype != "float8":
        return dense_parameters * workload.compute_itemsize
    spec = workload.spec
    num_tables = 1 if spec.tie_embeddings or workload.float8_head else 2
    return min(2.0 * dense_parameters, dense_parameters + num_tables * spec.vocab_size * spec.hidden_size / tp)


def compute_bytes_by_axis(workload: Workload, layout: Layout, batching: Batching) -> dict[str, float]:
    """Return the bytes that a rank sends per step to the next rank along each mesh axis, with ring collectives.

    Counts the rank with the most microbatches. Traffic of experts counts for every axis that ep is folded out of.
    """
    microbatches, tokens = -(-batching.count // layout.dp_size), batching.size * workload.seq_len / layout.cp
    passes, ring_size = microbatches * workload.spec.num_layers / layout.pp, layout.cp // layout.ulysses
    rank_parameters = count_max_rank_parameters(workload.spec, layout, workload.seq_len)
    parameters, shards = rank_parameters.dense + rank_parameters.experts, layout.dp_shard
    scatters, gathers = (microbatches if layout.zero >= 2 else 1), (2 * microbatches if layout.zero == 3 else 1)
    gathered_bytes = compute_gathered_bytes(workload, rank_parameters.dense, layout.tp)
    gathered_bytes += rank_parameters.experts * workload.compute_itemsize
    sharded_bytes = (scatters * parameters * workload.state_itemsize + gathers * gathered_bytes) * (shards - 1) / shards
    reduced_bytes = 2 * parameters / shards * workload.state_itemsize * (layout.dp_replicate - 1) / layout.dp_replicate
    per_layer_pass = 2 * compute_ulysses_bytes(workload, tokens, layout.tp, layout.ulysses) + 3 * (
        ring_size - 1
    ) * compute_ring_bytes(workload, tokens, layout.tp)
    bytes_by_axis = {
        "pp": 2 * layout.pipeline.stages_per_rank * microbatches * compute_pp_bytes(workload, tokens, layout.tp)
        if layout.pp > 1
        else 0.0,
        "dp_replicate": reduced_bytes * scatters,
        "dp_shard": sharded_bytes,
        "cp": passes * per_layer_pass,
        "tp": passes * 2 * TP_COLLECTIVES_PER_LAYER_PASS * compute_tp_bytes(workload, tokens, layout.tp),
    }
    ep_left = layout.ep
    for axis in EP_FOLDED_AXES:
        if ep_left > 1:
            bytes_by_axis[axis] += (
                passes * EP_ALL_TO_ALLS_PER_LAYER * compute_ep_bytes(workload, tokens, layout.tp, layout.ep)
            )
            ep_left //= min(ep_left, getattr(layout, axis))
    return bytes_by_axis
