"""Memory model: bytes on a rank's device at the peak of a step, by kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

from raytrain_hpc.config.model_spec import VOCAB_SIZE_MULTIPLE
from raytrain_hpc.planner.activation_memory import (
    Recompute,
    compute_layer_bytes_per_token,
    compute_offloaded_bytes_per_token,
)
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters
from raytrain_hpc.planner.pipeline_schedule import PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import count_max_deferred, count_max_in_flight
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload

_FRAGMENTATION = 0.12  # of allocated memory, lost in the caching allocator


@dataclass(frozen=True)
class MemoryFootprint:
    """Peak bytes on one rank.

    `copies`: copies of weights, in the compute dtype or gathered by ZeRO. `activations`: of the microbatches in flight.
    `working`: logits, or the working memory of a layer's backward pass. `host`: offloaded activations and moments, in
    host memory.
    """

    weights: int
    gradients: int
    moments: int
    copies: int
    activations: int
    working: int
    host: int = 0

    @property
    def allocated(self) -> int:
        """Bytes allocated on the device in total."""
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

    def get_max_stage_layers(self, layout: Layout) -> int:
        """Return the number of layers of the largest pipeline stage."""
        return max(self._stages.get_layer_counts(layout.pipeline.num_stages))

    def estimate_footprint(self, choice: LayoutChoice) -> MemoryFootprint:
        """Estimate the footprint of the rank that needs the most memory.

        Early pipeline stages hold more microbatches, and the last one holds the logits.
        """
        workload, layout = self._workload, choice.layout
        pipeline, tokens = layout.pipeline, choice.batching.size * workload.seq_len / layout.cp
        footprints = []
        for rank, rank_parameters in enumerate(self._stages.get_parameters(layout)):
            own_stages = pipeline.get_stages_of_rank(rank)
            has_head = pipeline.num_stages - 1 in own_stages
            activations = self._estimate_activations(choice, rank, own_stages)
            head_bytes = _compute_head_bytes(workload, tokens, layout.tp) if has_head else 0.0
            full = _estimate_rank(workload, choice, rank_parameters, activations, head_bytes, has_head=has_head)
            if choice.microbatches_per_rank > 1:
                footprints.append(full)
            else:  # with a single microbatch, gradients are still missing when activations peak
                first_gradients = (
                    min(full.gradients, workload.bucket_bytes)
                    if layout.num_state_replicas > 1 and layout.zero < 2
                    else 0
                )
                last_layer = replace(full, activations=int(activations.last), working=int(activations.last_working))
                footprints += [replace(full, gradients=first_gradients), last_layer]
        largest = max(footprints, key=lambda footprint: footprint.allocated)
        return replace(largest, host=max(footprint.host for footprint in footprints))

    def _estimate_activations(self, choice: LayoutChoice, rank: int, own_stages: Sequence[int]) -> _Activations:
        """Estimate the activations of a pipeline rank and its stages."""
        workload, layout = self._workload, choice.layout
        pipeline, tokens = layout.pipeline, choice.batching.size * workload.seq_len / layout.cp
        offloads, hidden_size = choice.activation_offload != "none", workload.spec.hidden_size
        kept = self._get_layer_bytes(layout.tp, "none", offloads).scale(tokens)
        recomputed = self._get_layer_bytes(layout.tp, choice.recompute, offloads).scale(tokens)
        boundary_bytes = 2 * tokens * hidden_size / layout.tp * workload.state_itemsize if layout.pp > 1 else 0.0
        in_flight, deferred = _count_microbatches(pipeline, choice.microbatches_per_rank)
        held_bytes = host_bytes = 0.0
        num_recomputed = num_kept = 0
        layer_counts = self._stages.get_layer_counts(pipeline.num_stages)
        for stage in own_stages:
            layers = layer_counts[stage]
            count = choice.count_recomputed_layers(layers)
            stage_bytes = recomputed.scale(count) + kept.scale(layers - count)
            held_bytes += in_flight[rank][stage] * (stage_bytes.device + boundary_bytes)
            # Between split backward passes: what the weight gradients need, recomputed or copied back.
            held_bytes += deferred[rank].get(stage, 0) * (layers * kept.total - stage_bytes.device)
            host_bytes += in_flight[rank][stage] * stage_bytes.host
            num_recomputed, num_kept = num_recomputed + count, num_kept + layers - count
        # Backward pass of a layer: gradients of its two widest tensors, and a few others.
        backward_bytes = tokens * (2 * workload.spec.active_ffn_size + 4 * hidden_size) / layout.tp
        backward_bytes *= workload.compute_itemsize
        layer = recomputed if num_recomputed else kept
        recomputed_bytes = kept.total - recomputed.total if num_recomputed else 0.0
        # Offloaded activations are on the device for the layer in use and the next one.
        newest = kept if num_kept else recomputed
        last_working = backward_bytes + recomputed_bytes + layer.host
        # The layers that keep all activations come first in the backward pass: they make room for the recomputed ones.
        first_working = backward_bytes + (0.0 if num_kept else recomputed_bytes)
        first_working += newest.host * min(2, num_recomputed + num_kept)
        return _Activations(
            held=held_bytes,
            working=first_working,
            newest=newest.host,
            last=layer.device + boundary_bytes,
            last_working=last_working,
            host=host_bytes,
            recomputed_share=num_recomputed / (num_recomputed + num_kept),
        )

    def _compute_layer_bytes(self, tp: int, recompute: Recompute, offloads: bool) -> _LayerBytes:
        workload = self._workload
        compute_total, compute_host = (
            partial(
                compute, workload.spec, tp=tp, dtype=workload.dtype, recompute=recompute, compiled=workload.compiled
            )
            for compute in (compute_layer_bytes_per_token, compute_offloaded_bytes_per_token)
        )
        host_bytes = compute_host() if offloads else 0.0
        return _LayerBytes(compute_total() - host_bytes, host_bytes)


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes that a layer keeps from the forward pass for the backward pass, by place."""

    device: float
    host: float

    @property
    def total(self) -> float:
        return self.device + self.host

    def __add__(self, other: _LayerBytes) -> _LayerBytes:
        return _LayerBytes(self.device + other.device, self.host + other.host)

    def scale(self, factor: float) -> _LayerBytes:
        return _LayerBytes(factor * self.device, factor * self.host)


@dataclass(frozen=True)
class _Activations:
    """Bytes of activations of a rank.

    `held`: on the device, of all microbatches in flight. `working`: in the first backward pass of a layer. `newest`: of
    the newest layer, which is not offloaded while the head computes. `last`, `last_working`: the same in the last
    backward pass of a layer, when those of all other layers are free. `recomputed_share`: of the rank's layers.
    """

    held: float
    working: float
    newest: float
    last: float
    last_working: float
    host: float
    recomputed_share: float


def _estimate_rank(
    workload: Workload,
    choice: LayoutChoice,
    rank_parameters: RankParameters,
    activations: _Activations,
    head_bytes: float,
    *,
    has_head: bool,
) -> MemoryFootprint:
    layout, state_itemsize, moments = choice.layout, workload.state_itemsize, 0 if workload.optimizer == "sgd" else 2
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    totals = [0.0] * 4
    # Autocast copies of layers that are not recomputed stay until the backward pass has used them. Float8 products, all
    # dense ones but the head's, quantize their weights in both passes and keep no copy.
    copied_share = 1 - activations.recomputed_share if workload.compute_itemsize < state_itemsize else 0.0
    copied_dense_share = 0.0 if workload.dtype == "float8" else copied_share
    host_bytes = activations.host
    for parameters, shards, share in (
        (rank_parameters.dense, layout.dp_shard, copied_dense_share),
        (rank_parameters.experts, expert_shards, copied_share),
    ):
        zero_stage = layout.zero if shards > 1 else 0
        totals[0] += parameters * state_itemsize / (shards if zero_stage else 1)
        totals[1] += parameters * state_itemsize / (shards if zero_stage >= 2 else 1)
        moment_bytes = parameters * state_itemsize * moments / (shards if zero_stage else 1)
        totals[2] += moment_bytes if choice.offload == "none" else 0
        host_bytes += moment_bytes if choice.offload == "cpu" else 0
        if zero_stage in (1, 2):  # weights gathered by ZeRO stay for the step
            totals[3] += parameters * workload.compute_itemsize
        elif zero_stage == 0:
            totals[3] += parameters * workload.compute_itemsize * share
    if (
        workload.compute_itemsize < state_itemsize
        and has_head
        and not workload.float8_head
        and not (layout.zero and layout.dp_shard > 1)
    ):
        head_elements = _count_head_elements(workload, layout.tp)
        totals[3] += head_elements * workload.compute_itemsize * (1 - copied_dense_share)
    if layout.zero == 3 and layout.dp_shard > 1:  # the unit in use, the prefetched one, and a gradient to reduce
        message_itemsize = 1 if workload.dtype == "float8" else 0  # gathered before it is converted to bf16
        totals[3] += rank_parameters.largest_unit * (2 * workload.compute_itemsize + message_itemsize + state_itemsize)
    working_bytes = max(head_bytes + activations.newest if has_head else 0.0, activations.working)
    return MemoryFootprint(*(int(total) for total in (*totals, activations.held, working_bytes, host_bytes)))


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


_StageCounts = tuple[dict[int, int], ...]  # for each rank, a number of microbatches for each of its stages


@lru_cache(maxsize=4096)
def _count_microbatches(pipeline: PipelineSchedule, microbatches: int) -> tuple[_StageCounts, _StageCounts]:
    """Return the most microbatches in flight, and the most between split backward passes."""
    if pipeline.name in ("gpipe", "1f1b"):
        max_counts = (
            microbatches if pipeline.name == "gpipe" else min(microbatches, pipeline.num_ranks - rank)
            for rank in range(pipeline.num_ranks)
        )
        in_flight = tuple({rank: count} for rank, count in enumerate(max_counts))
        return in_flight, ({},) * pipeline.num_ranks
    orders = pipeline.build_orders(pipeline.get_representative_microbatches(microbatches))
    return tuple(map(count_max_in_flight, orders)), tuple(map(count_max_deferred, orders))
