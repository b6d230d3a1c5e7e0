"""What a rank's device has to hold at the fullest moment of a step, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache

from raytrain_hpc.config.model_spec import VOCAB_SIZE_MULTIPLE
from raytrain_hpc.planner.activation_memory import Recompute, compute_layer_bytes_per_token
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.model_state_memory import RankParameters
from raytrain_hpc.planner.pipeline_schedule import PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import count_max_in_flight
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload

_FRAGMENTATION = 0.12  # of what is allocated, by which a device's caching allocator holds more


@dataclass(frozen=True)
class MemoryFootprint:
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

    def compute_required_gib(self, device: Device) -> float:
        """GiB that a device needs for it, with what is lost to fragments and taken by the device's own needs."""
        lost = _FRAGMENTATION if device.reserved_gib else 0.0
        return self.allocated * (1 + lost) / 2**30 + device.reserved_gib


class MemoryModel:
    """Footprints of this work. Remembers what recurs in a search."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._stages = StageCache(workload)
        self._get_layer_bytes = cache(self._compute_layer_bytes)

    def estimate_footprint(self, choice: LayoutChoice) -> MemoryFootprint:
        """Of the rank that needs most: early stages of a pipeline hold more microbatches, the last has the logits."""
        work, layout = self._workload, choice.layout
        pipeline, tokens = layout.pipeline, choice.batching.size * work.seq_len / layout.cp
        stages = self._stages.get_layer_counts(pipeline.num_stages)
        kept = tokens * self._get_layer_bytes(layout.tp, choice.recompute)
        # Going back through a layer: what is computed again, gradients of both its widest tensors, and a few others.
        back = (
            tokens * (2 * work.shape.active_ffn_size + 4 * work.shape.hidden_size) / layout.tp * work.compute_itemsize
        )
        back += tokens * self._get_layer_bytes(layout.tp, "none") - kept
        handed = 2 * tokens * work.shape.hidden_size / layout.tp * work.state_itemsize if layout.pp > 1 else 0.0
        flying = _count_max_in_flight(pipeline, choice.microbatches_per_rank)
        found = []
        for rank, own in enumerate(self._stages.get_parameters(layout)):
            mine = pipeline.get_stages_of_rank(rank)
            last = pipeline.num_stages - 1 in mine
            held = sum(flying[rank][stage] * (stages[stage] * kept + handed) for stage in mine)
            working = max(_compute_head_bytes(work, tokens, layout.tp) if last else 0.0, back)
            whole = _estimate_rank(work, choice, own, held, working, has_head=last)
            if choice.microbatches_per_rank > 1:
                found.append(whole)
            else:  # of a step's only microbatch there are no gradients yet where most is kept, and all of them later
                first = (
                    min(whole.gradients, work.bucket_bytes) if layout.num_state_replicas > 1 and layout.zero < 2 else 0
                )
                found.append(replace(whole, gradients=first))
                found.append(replace(whole, activations=int(kept + handed), working=int(back)))
        return max(found, key=lambda one: one.allocated)

    def _compute_layer_bytes(self, tp: int, recompute: Recompute) -> float:
        work = self._workload
        return compute_layer_bytes_per_token(
            work.shape, tp=tp, dtype=work.dtype, recompute=recompute, compiled=work.compiled
        )


def _estimate_rank(
    workload: Workload,
    choice: LayoutChoice,
    rank_parameters: RankParameters,
    activation_bytes: float,
    working_bytes: float,
    *,
    has_head: bool,
) -> MemoryFootprint:
    layout, wide, moments = choice.layout, workload.state_itemsize, 2 if workload.optimizer == "adamw" else 0
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    sums = [0.0] * 4
    for parameters, shards in ((rank_parameters.dense, layout.dp_shard), (rank_parameters.experts, expert_shards)):
        zero = layout.zero if shards > 1 else 0
        sums[0] += parameters * wide / (shards if zero else 1)
        sums[1] += parameters * wide / (shards if zero >= 2 else 1)
        sums[2] += parameters * wide * moments / (shards if zero else 1) if choice.offload == "none" else 0
        # What ZeRO-1 and 2 gather stays for the step; what autocast has cast, as long as a backward pass needs it.
        if zero in (1, 2) or (workload.compute_itemsize < wide and zero == 0 and choice.recompute == "none"):
            sums[3] += parameters * workload.compute_itemsize
    if (
        workload.compute_itemsize < wide
        and choice.recompute != "none"
        and has_head
        and not (layout.zero and layout.dp_shard > 1)
    ):
        sums[3] += _count_head_elements(workload, layout.tp) * workload.compute_itemsize
    if layout.zero == 3 and layout.dp_shard > 1:  # the unit in use, the one ahead, and a gradient that is reduced next
        sums[3] += rank_parameters.largest_unit * (2 * workload.compute_itemsize + wide)
    weights, gradients, kept, copies = (int(one) for one in sums)
    return MemoryFootprint(weights, gradients, kept, copies, int(activation_bytes), int(working_bytes))


def _compute_head_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """At the start of the backward pass: logits and what they become, and the last norm's input and result.

    A logit is the result of the head, and in fp32 its logarithm or probability and one gradient, or where the whole
    vocabulary is on one rank two of them, the loss's being as large. Where the loss is compiled it is the result and
    its gradient, once more where that is filled up to whole tiles, and beside them there is that of the head's table.
    """
    shape, wide, width = workload.shape, workload.state_itemsize, workload.compute_itemsize
    norm = tokens * shape.hidden_size * (wide / tp + width)
    logits = tokens * shape.vocab_size / tp
    if workload.compiled:
        return (
            norm
            + logits * (3 if shape.vocab_size % VOCAB_SIZE_MULTIPLE else 2) * width
            + _count_head_elements(workload, tp) * width
        )
    return norm + logits * ((3 if tp == 1 else 2) * wide + width)


def _count_head_elements(workload: Workload, tp: int) -> float:
    """Elements of the head."""
    return workload.shape.vocab_size * workload.shape.hidden_size / tp


@lru_cache(maxsize=4096)
def _count_max_in_flight(pipeline: PipelineSchedule, microbatches: int) -> tuple[dict[int, int], ...]:
    """Most microbatches of each stage that each rank holds at once."""
    if pipeline.name in ("gpipe", "1f1b"):
        most = (
            microbatches if pipeline.name == "gpipe" else min(microbatches, pipeline.num_ranks - r)
            for r in range(pipeline.num_ranks)
        )
        return tuple({rank: count} for rank, count in enumerate(most))
    return tuple(
        count_max_in_flight(order)
        for order in pipeline.build_orders(pipeline.get_representative_microbatches(microbatches))
    )
