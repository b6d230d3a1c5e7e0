"""Memory model: bytes on a rank's device at the peak of a step, by kind."""

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

_FRAGMENTATION = 0.12  # of allocated memory, lost in the caching allocator


@dataclass(frozen=True)
class MemoryFootprint:
    """Peak bytes on one rank.

    `copies`: copies of weights, in the compute dtype or gathered by ZeRO. `activations`: of the microbatches in flight.
    `working`: logits, or the working memory of a layer's backward pass.
    """

    weights: int
    gradients: int
    moments: int
    copies: int
    activations: int
    working: int

    @property
    def allocated(self) -> int:
        """Bytes allocated in total."""
        return self.weights + self.gradients + self.moments + self.copies + self.activations + self.working

    def compute_required_gib(self, device: Device) -> float:
        """Return the GiB needed on a device, including fragmentation and the device's reserved memory."""
        fragmentation = _FRAGMENTATION if device.reserved_gib else 0.0
        return self.allocated * (1 + fragmentation) / 2**30 + device.reserved_gib


class MemoryModel:
    """Estimator of the memory footprint of a workload. Caches results for a layout search."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._stages = StageCache(workload)
        self._get_layer_bytes = cache(self._compute_layer_bytes)

    def estimate_footprint(self, choice: LayoutChoice) -> MemoryFootprint:
        """Estimate the footprint of the rank that needs the most memory.

        Early pipeline stages hold more microbatches, and the last one holds the logits.
        """
        workload, layout = self._workload, choice.layout
        pipeline, tokens = layout.pipeline, choice.batching.size * workload.seq_len / layout.cp
        stages = self._stages.get_layer_counts(pipeline.num_stages)
        layer_bytes = tokens * self._get_layer_bytes(layout.tp, choice.recompute)
        # Backward pass of a layer: recomputed activations, gradients of its two widest tensors, and a few others.
        backward_bytes = (
            tokens
            * (2 * workload.spec.active_ffn_size + 4 * workload.spec.hidden_size)
            / layout.tp
            * workload.compute_itemsize
        )
        backward_bytes += tokens * self._get_layer_bytes(layout.tp, "none") - layer_bytes
        boundary_bytes = (
            2 * tokens * workload.spec.hidden_size / layout.tp * workload.state_itemsize if layout.pp > 1 else 0.0
        )
        in_flight = _count_max_in_flight(pipeline, choice.microbatches_per_rank)
        footprints = []
        for rank, rank_parameters in enumerate(self._stages.get_parameters(layout)):
            own_stages = pipeline.get_stages_of_rank(rank)
            has_head = pipeline.num_stages - 1 in own_stages
            activation_bytes = sum(
                in_flight[rank][stage] * (stages[stage] * layer_bytes + boundary_bytes) for stage in own_stages
            )
            working_bytes = max(_compute_head_bytes(workload, tokens, layout.tp) if has_head else 0.0, backward_bytes)
            full = _estimate_rank(workload, choice, rank_parameters, activation_bytes, working_bytes, has_head=has_head)
            if choice.microbatches_per_rank > 1:
                footprints.append(full)
            else:  # with a single microbatch, gradients are still missing when activations peak
                first_gradients = (
                    min(full.gradients, workload.bucket_bytes)
                    if layout.num_state_replicas > 1 and layout.zero < 2
                    else 0
                )
                footprints.append(replace(full, gradients=first_gradients))
                footprints.append(
                    replace(full, activations=int(layer_bytes + boundary_bytes), working=int(backward_bytes))
                )
        return max(footprints, key=lambda footprint: footprint.allocated)

    def _compute_layer_bytes(self, tp: int, recompute: Recompute) -> float:
        workload = self._workload
        return compute_layer_bytes_per_token(
            workload.spec, tp=tp, dtype=workload.dtype, recompute=recompute, compiled=workload.compiled
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
    layout, state_itemsize, moments = choice.layout, workload.state_itemsize, 0 if workload.optimizer == "sgd" else 2
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    totals = [0.0] * 4
    # Autocast copies stay until the backward pass has used them. Float8 products, all dense ones but the head's,
    # quantize their weights in both passes and keep no copy.
    keeps_copies = workload.compute_itemsize < state_itemsize and choice.recompute == "none"
    keeps_dense_copies = keeps_copies and workload.dtype != "float8"
    for parameters, shards, has_copies in (
        (rank_parameters.dense, layout.dp_shard, keeps_dense_copies),
        (rank_parameters.experts, expert_shards, keeps_copies),
    ):
        zero_stage = layout.zero if shards > 1 else 0
        totals[0] += parameters * state_itemsize / (shards if zero_stage else 1)
        totals[1] += parameters * state_itemsize / (shards if zero_stage >= 2 else 1)
        totals[2] += (
            parameters * state_itemsize * moments / (shards if zero_stage else 1) if choice.offload == "none" else 0
        )
        if zero_stage in (1, 2) or (has_copies and zero_stage == 0):  # weights gathered by ZeRO stay for the step
            totals[3] += parameters * workload.compute_itemsize
    if (
        workload.compute_itemsize < state_itemsize
        and not keeps_dense_copies
        and has_head
        and not workload.float8_head
        and not (layout.zero and layout.dp_shard > 1)
    ):
        totals[3] += _count_head_elements(workload, layout.tp) * workload.compute_itemsize
    if layout.zero == 3 and layout.dp_shard > 1:  # the unit in use, the prefetched one, and a gradient to reduce
        message_itemsize = 1 if workload.dtype == "float8" else 0  # gathered before it is converted to bf16
        totals[3] += rank_parameters.largest_unit * (2 * workload.compute_itemsize + message_itemsize + state_itemsize)
    weight_bytes, gradient_bytes, moment_bytes, copy_bytes = (int(total) for total in totals)
    return MemoryFootprint(
        weight_bytes, gradient_bytes, moment_bytes, copy_bytes, int(activation_bytes), int(working_bytes)
    )


def _compute_head_bytes(workload: Workload, tokens: float, tp: int) -> float:
    """Return the bytes of logits, loss and last norm at the start of the backward pass.

    Kept are the input and output of the last norm, and each logit in the compute dtype. In the state dtype the loss
    adds two values per logit, or three if the whole vocabulary is on one rank. A compiled loss instead keeps the logit
    and its gradient in the compute dtype, a third value if the vocabulary is padded to whole tiles, and the gradient of
    the head's weights.
    """
    spec, state_itemsize, itemsize = workload.spec, workload.state_itemsize, workload.compute_itemsize
    norm_bytes = tokens * spec.hidden_size * (state_itemsize / tp + itemsize)
    logits = tokens * spec.vocab_size / tp
    if workload.loss_chunks > 1:  # of one chunk; and the gradients of the head's input and weights
        grads = tokens * spec.hidden_size * itemsize + _count_head_elements(workload, tp) * state_itemsize
        return norm_bytes + grads + logits / workload.loss_chunks * (2 * state_itemsize + 2 * itemsize)
    if workload.compiled:
        return (
            norm_bytes
            + logits * (3 if spec.vocab_size % VOCAB_SIZE_MULTIPLE else 2) * itemsize
            + _count_head_elements(workload, tp) * itemsize
        )
    return norm_bytes + logits * ((3 if tp == 1 else 2) * state_itemsize + itemsize)


def _count_head_elements(workload: Workload, tp: int) -> float:
    """Return the number of weights of the head on a rank."""
    return workload.spec.vocab_size * workload.spec.hidden_size / tp


@lru_cache(maxsize=4096)
def _count_max_in_flight(pipeline: PipelineSchedule, microbatches: int) -> tuple[dict[int, int], ...]:
    """Return, for each rank, the most microbatches in flight of each of its stages."""
    if pipeline.name in ("gpipe", "1f1b"):
        max_counts = (
            microbatches if pipeline.name == "gpipe" else min(microbatches, pipeline.num_ranks - rank)
            for rank in range(pipeline.num_ranks)
        )
        return tuple({rank: count} for rank, count in enumerate(max_counts))
    return tuple(
        count_max_in_flight(order)
        for order in pipeline.build_orders(pipeline.get_representative_microbatches(microbatches))
    )
