"""What ranks send one another in a step, in bytes: by exchange, and by axis of the mesh."""

from __future__ import annotations

from raytrain_hpc.planner.layout import EP_FOLDED_AXES, Batching, Layout
from raytrain_hpc.planner.model_state_memory import count_max_rank_parameters
from raytrain_hpc.planner.workload import Workload

TP_COLLECTIVES_PER_LAYER_PASS = 4  # a layer and pass: gathered before two products, scattered after two
EP_ALL_TO_ALLS_PER_LAYER = 4  # a layer: rows go to their experts and come back, in both passes


def compute_tp_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """A rank's part of one exchange of the residual stream of so many tokens over tensor-parallel ranks."""
    return tokens * workload.shape.hidden_size * workload.compute_itemsize * (tp - 1) / tp


def compute_ulysses_bytes(workload: Workload, tokens: float, tp: int, ulysses: int) -> float:
    """One pass: queries, keys, values and results of a rank's tokens, exchanged for those of its heads."""
    rows = 2 * (workload.shape.attention_size + workload.shape.kv_size) / tp
    return tokens * rows * workload.compute_itemsize * (ulysses - 1) / ulysses


def compute_ring_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """One hand-over of the keys and values of a rank's tokens to the next one of a ring."""
    return tokens * 2 * workload.shape.kv_size / tp * workload.compute_itemsize


def compute_ep_bytes(workload: Workload, tokens: float, tp: int, ep: int) -> float:
    """One exchange of a rank's rows with the ranks of their experts under uniform routing."""
    routed = tokens * workload.shape.experts_per_token * workload.shape.hidden_size / tp
    return routed * workload.compute_itemsize * (ep - 1) / ep


def compute_pp_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """A microbatch's residual stream, or its gradient, between two stages."""
    return tokens * workload.shape.hidden_size / tp * workload.compute_itemsize


def compute_bytes_by_axis(workload: Workload, layout: Layout, batching: Batching) -> dict[str, float]:
    """Bytes that a rank sends in a step to the next one along each axis of the mesh, the collectives being rings.

    Rows of experts count for all axes that these are folded out of. Microbatches of the rank that has most.
    """
    turns, tokens = -(-batching.count // layout.dp_size), batching.size * workload.seq_len / layout.cp
    passes, ring = turns * workload.shape.num_layers / layout.pp, layout.cp // layout.ulysses
    own = count_max_rank_parameters(workload.shape, layout, workload.seq_len)
    parameters, shards = own.dense + own.experts, layout.dp_shard
    scatters, gathers = (turns if layout.zero >= 2 else 1), (2 * turns if layout.zero == 3 else 1)
    sharded = (
        parameters * (shards - 1) / shards * (scatters * workload.state_itemsize + gathers * workload.compute_itemsize)
    )
    summed = 2 * parameters / shards * workload.state_itemsize * (layout.dp_replicate - 1) / layout.dp_replicate
    around = 2 * compute_ulysses_bytes(workload, tokens, layout.tp, layout.ulysses) + 3 * (
        ring - 1
    ) * compute_ring_bytes(workload, tokens, layout.tp)
    found = {
        "pp": 2 * layout.pipeline.stages_per_rank * turns * compute_pp_bytes(workload, tokens, layout.tp)
        if layout.pp > 1
        else 0.0,
        "dp_replicate": summed * scatters,
        "dp_shard": sharded,
        "cp": passes * around,
        "tp": passes * 2 * TP_COLLECTIVES_PER_LAYER_PASS * compute_tp_bytes(workload, tokens, layout.tp),
    }
    left = layout.ep
    for axis in EP_FOLDED_AXES:
        if left > 1:
            found[axis] += passes * EP_ALL_TO_ALLS_PER_LAYER * compute_ep_bytes(workload, tokens, layout.tp, layout.ep)
            left //= min(left, getattr(layout, axis))
    return found
