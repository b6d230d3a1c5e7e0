"""What ranks send one another in a step, in bytes: by exchange, and by axis of the mesh."""

from __future__ import annotations

from raytrain_hpc.planner.layout import FOLDED, Batching, Layout
from raytrain_hpc.planner.model_state_memory import parameters_of_rank
from raytrain_hpc.planner.workload import Work

TENSOR_EXCHANGES = 4  # a layer and pass: gathered before two products, scattered after two
EXPERT_EXCHANGES = 4  # a layer: rows go to their experts and come back, in both passes


def of_tensor(work: Work, tokens: float, tp: int) -> float:
    """A rank's part of one exchange of the residual stream of so many tokens over tensor-parallel ranks."""
    return tokens * work.shape.hidden_size * work.width * (tp - 1) / tp


def of_ulysses(work: Work, tokens: float, tp: int, ulysses: int) -> float:
    """One pass: queries, keys, values and results of a rank's tokens, exchanged for those of its heads."""
    rows = 2 * (work.shape.attention_size + work.shape.kv_size) / tp
    return tokens * rows * work.width * (ulysses - 1) / ulysses


def of_ring(work: Work, tokens: float, tp: int) -> float:
    """One hand-over of the keys and values of a rank's tokens to the next one of a ring."""
    return tokens * 2 * work.shape.kv_size / tp * work.width


def of_experts(work: Work, tokens: float, tp: int, ep: int) -> float:
    """One exchange of a rank's rows with the ranks of their experts under uniform routing."""
    routed = tokens * work.shape.experts_per_token * work.shape.hidden_size / tp
    return routed * work.width * (ep - 1) / ep


def of_stage(work: Work, tokens: float, tp: int) -> float:
    """A microbatch's residual stream, or its gradient, between two stages."""
    return tokens * work.shape.hidden_size / tp * work.width


def by_axis(work: Work, layout: Layout, batching: Batching) -> dict[str, float]:
    """Bytes that a rank sends in a step to the next one along each axis of the mesh, the collectives being rings.

    Rows of experts count for all axes that these are folded out of. Microbatches of the rank that has most.
    """
    turns, tokens = -(-batching.count // layout.data_parallel), batching.size * work.seq_len / layout.cp
    passes, ring = turns * work.shape.num_layers / layout.pp, layout.cp // layout.ulysses
    own = parameters_of_rank(work.shape, layout, work.seq_len)
    parameters, shards = own.dense + own.experts, layout.dp_shard
    scatters, gathers = (turns if layout.zero >= 2 else 1), (2 * turns if layout.zero == 3 else 1)
    sharded = parameters * (shards - 1) / shards * (scatters * work.state_width + gathers * work.width)
    summed = 2 * parameters / shards * work.state_width * (layout.dp_replicate - 1) / layout.dp_replicate
    around = 2 * of_ulysses(work, tokens, layout.tp, layout.ulysses) + 3 * (ring - 1) * of_ring(work, tokens, layout.tp)
    found = {
        "pp": 2 * layout.pipeline.per_rank * turns * of_stage(work, tokens, layout.tp) if layout.pp > 1 else 0.0,
        "dp_replicate": summed * scatters,
        "dp_shard": sharded,
        "cp": passes * around,
        "tp": passes * 2 * TENSOR_EXCHANGES * of_tensor(work, tokens, layout.tp),
    }
    left = layout.ep
    for axis in FOLDED:
        if left > 1:
            found[axis] += passes * EXPERT_EXCHANGES * of_experts(work, tokens, layout.tp, layout.ep)
            left //= min(left, getattr(layout, axis))
    return found
