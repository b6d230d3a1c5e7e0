"""What a rank's device has to hold at the fullest moment of a step, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from raytrain_hpc.config.model_spec import VOCABULARY_TILE
from raytrain_hpc.planner.activation_memory import Recompute, layer_bytes_per_token
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.model_state_memory import RankParameters
from raytrain_hpc.planner.pipeline_schedule import Schedule
from raytrain_hpc.planner.pipeline_timeline import most_in_flight
from raytrain_hpc.planner.stage_cache import Shares
from raytrain_hpc.planner.workload import Choice, Work

_FRAGMENTATION = 0.12  # of what is allocated, by which a device's caching allocator holds more


@dataclass(frozen=True)
class Footprint:
    """Bytes on one rank. `copies`: of weights, in the compute type, and what ZeRO has gathered of them; `activations`
    of the microbatches in flight; `working`: logits, or what going back through a layer takes."""

    weights: int
    gradients: int
    moments: int
    copies: int
    activations: int
    working: int

    @property
    def allocated(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.moments + self.copies + self.activations + self.working

    def gib_on(self, device: Device) -> float:
        """GiB that a device needs for it, with what is lost to fragments and taken by the device's own needs."""
        lost = _FRAGMENTATION if device.reserved_gib else 0.0
        return self.allocated * (1 + lost) / 2**30 + device.reserved_gib


class MemoryModel:
    """Footprints of this work. Remembers what recurs in a search."""

    def __init__(self, work: Work):
        self._work = work
        self._shares = Shares(work)
        self._kept = cache(self._kept_of_layer)

    def footprint(self, choice: Choice) -> Footprint:
        """Of the rank that needs most: early stages of a pipeline hold more microbatches, the last has the logits."""
        work, layout = self._work, choice.layout
        pipeline, tokens = layout.pipeline, choice.batching.size * work.seq_len / layout.cp
        stages = self._shares.layers(pipeline.stages)
        kept = tokens * self._kept(layout.tp, choice.recompute)
        # Going back through a layer: what is computed again, gradients of both its widest tensors, and a few others.
        back = tokens * (2 * work.shape.channels_met + 4 * work.shape.hidden_size) / layout.tp * work.width
        back += tokens * self._kept(layout.tp, "none") - kept
        handed = 2 * tokens * work.shape.hidden_size / layout.tp * work.state_width if layout.pp > 1 else 0.0
        flying = _in_flight(pipeline, choice.turns)
        found = []
        for rank, own in enumerate(self._shares.parameters(layout)):
            mine = pipeline.stages_of(rank)
            last = pipeline.stages - 1 in mine
            held = sum(flying[rank][stage] * (stages[stage] * kept + handed) for stage in mine)
            working = max(_head_bytes(work, tokens, layout.tp) if last else 0.0, back)
            whole = _of_rank(work, choice, own, held, working, head=last)
            if choice.turns > 1:
                found.append(whole)
            else:  # of a step's only microbatch there are no gradients yet where most is kept, and all of them later
                first = min(whole.gradients, work.bucket_bytes) if layout.copies > 1 and layout.zero < 2 else 0
                found.append(replace(whole, gradients=first))
                found.append(replace(whole, activations=int(kept + handed), working=int(back)))
        return max(found, key=lambda one: one.allocated)

    def _kept_of_layer(self, tp: int, recompute: Recompute) -> float:
        work = self._work
        return layer_bytes_per_token(work.shape, tp=tp, dtype=work.dtype, recompute=recompute, compiled=work.compiled)


def _of_rank(work: Work, choice: Choice, own: RankParameters, held: float, working: float, *, head: bool) -> Footprint:
    layout, wide, moments = choice.layout, work.state_width, 2 if work.optimizer == "adamw" else 0
    expert_shards = layout.expert_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    sums = [0.0] * 4
    for parameters, shards in ((own.dense, layout.dp_shard), (own.experts, expert_shards)):
        zero = layout.zero if shards > 1 else 0
        sums[0] += parameters * wide / (shards if zero else 1)
        sums[1] += parameters * wide / (shards if zero >= 2 else 1)
        sums[2] += parameters * wide * moments / (shards if zero else 1) if choice.offload == "none" else 0
        # What ZeRO-1 and 2 gather stays for the step; what autocast has cast, as long as a backward pass needs it.
        if zero in (1, 2) or (work.width < wide and zero == 0 and choice.recompute == "none"):
            sums[3] += parameters * work.width
    if work.width < wide and choice.recompute != "none" and head and not (layout.zero and layout.dp_shard > 1):
        sums[3] += _table(work, layout.tp) * work.width
    if layout.zero == 3 and layout.dp_shard > 1:  # the unit in use, the one ahead, and a gradient that is reduced next
        sums[3] += own.unit * (2 * work.width + wide)
    weights, gradients, kept, copies = (int(one) for one in sums)
    return Footprint(weights, gradients, kept, copies, int(held), int(working))


def _head_bytes(work: Work, tokens: float, tp: int) -> float:
    """At the start of the backward pass: logits and what they become, and the last norm's input and result.

    A logit is the result of the head, and in fp32 its logarithm or probability and one gradient, or where the whole
    vocabulary is on one rank two of them, the loss's being as large. Where the loss is compiled it is the result and
    its gradient, once more where that is filled up to whole tiles, and beside them there is that of the head's table.
    """
    shape, wide, width = work.shape, work.state_width, work.width
    norm = tokens * shape.hidden_size * (wide / tp + width)
    logits = tokens * shape.vocab_size / tp
    if work.compiled:
        return norm + logits * (3 if shape.vocab_size % VOCABULARY_TILE else 2) * width + _table(work, tp) * width
    return norm + logits * ((3 if tp == 1 else 2) * wide + width)


def _table(work: Work, tp: int) -> float:
    """Elements of the head."""
    return work.shape.vocab_size * work.shape.hidden_size / tp


@lru_cache(maxsize=4096)
def _in_flight(pipeline: Schedule, turns: int) -> tuple[dict[int, int], ...]:
    """Most microbatches of each stage that each rank holds at once."""
    if pipeline.name in ("gpipe", "1f1b"):
        most = (turns if pipeline.name == "gpipe" else min(turns, pipeline.ranks - r) for r in range(pipeline.ranks))
        return tuple({rank: count} for rank, count in enumerate(most))
    return tuple(most_in_flight(order) for order in pipeline.orders(pipeline.enough(turns)))
