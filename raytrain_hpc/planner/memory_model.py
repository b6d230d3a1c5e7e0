"""Memory model: bytes on a rank's device at the peak of a step, by kind."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raytrain_hpc.config.model_spec import VOCAB_SIZE_MULTIPLE
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters
from raytrain_hpc.planner.rank_activations import ActivationModel, RankActivations
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload

AUDIT_PART_BYTES = 256 << 20  # of weights, gradients and moments that audits copy at a time
_FRAGMENTATION = 0.12  # of allocated memory, lost in the caching allocator


@dataclass(frozen=True)
class MemoryFootprint:
    """Peak bytes on one rank.

    `copies`: copies of weights, in the compute dtype or gathered by ZeRO. `activations`: of the microbatches in flight.
    `working`: logits, or the working memory of a layer's backward pass. `host`: offloaded activations and moments, in
    host memory. `sums`: partial sums of gradients, with elastic determinism.
    """

    weights: int
    gradients: int
    moments: int
    copies: int
    activations: int
    working: int
    host: int = 0
    sums: int = 0

    @property
    def allocated(self) -> int:
        """Bytes allocated on the device in total."""
        of_state = self.weights + self.gradients + self.moments + self.copies + self.sums
        return of_state + self.activations + self.working

    def compute_required_gib(self, device: Device) -> float:
        """Return the GiB needed on a device, including fragmentation and the device's reserved memory."""
        fragmentation = _FRAGMENTATION if device.reserved_gib else 0.0
        return self.allocated * (1 + fragmentation) / 2**30 + device.reserved_gib


class MemoryModel:
    """Estimator of the memory footprint of a workload. Caches results for a layout search."""

    def __init__(self, workload: Workload):
        self._workload = workload
        self._stages = StageCache(workload)
        self._activations = ActivationModel(workload, self._stages)

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
            activations = self._activations.estimate(choice, rank, own_stages)
            residual_itemsize = workload.get_residual_itemsize(layout)
            head_bytes = _compute_head_bytes(workload, tokens, layout.tp, residual_itemsize) if has_head else 0.0
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
            if workload.audited:
                footprints.append(_estimate_audit(workload, layout, full))
        largest = max(footprints, key=lambda footprint: footprint.allocated)
        return replace(largest, host=max(footprint.host for footprint in footprints))


def _estimate_rank(
    workload: Workload,
    choice: LayoutChoice,
    rank_parameters: RankParameters,
    activations: RankActivations,
    head_bytes: float,
    *,
    has_head: bool,
) -> MemoryFootprint:
    layout, state_itemsize = choice.layout, workload.state_itemsize
    expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else layout.dp_shard
    totals, sum_bytes = [0.0] * 4, 0.0
    # Autocast copies of layers that are not recomputed stay until the backward pass has used them. Float8 products, all
    # dense ones but the head's, quantize their weights in both passes and keep no copy.
    cast_share = 1 - activations.recomputed_share if workload.compute_itemsize < state_itemsize else 0.0
    cast_dense_share = 0.0 if workload.dtype == "float8" else cast_share
    copies_dense, copies_experts = workload.keeps_weight_copies(choice)
    copied_dense_share = 1.0 if copies_dense else cast_dense_share
    host_bytes = activations.host
    for parameters, shards, share in (
        (rank_parameters.dense, layout.dp_shard, copied_dense_share),
        (rank_parameters.experts, expert_shards, 1.0 if copies_experts else cast_share),
    ):
        zero_stage = layout.zero if shards > 1 else 0
        totals[0] += parameters * state_itemsize / (shards if zero_stage else 1)
        totals[1] += parameters * state_itemsize / (shards if zero_stage >= 2 else 1)
        if workload.elastic:
            sum_bytes += parameters * state_itemsize * _count_partial_sums(choice, zero_stage)
        moment_bytes = parameters * workload.moments_itemsize / (shards if zero_stage else 1)
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
    if workload.elastic and layout.zero >= 2 and layout.dp_shard > 1:  # the gradients of a unit, sent and received
        sum_bytes += 2 * rank_parameters.largest_unit * state_itemsize
    working_bytes = max(head_bytes + activations.newest if has_head else 0.0, activations.working)
    return MemoryFootprint(*map(int, (*totals, activations.held, working_bytes, host_bytes, sum_bytes)))


def _count_partial_sums(choice: LayoutChoice, zero_stage: int) -> float:
    """Return how many whole gradients the partial sums of a rank take, with elastic determinism.

    Sums of one and more microbatches wait for others of the same number, like the digits of a binary counter. Their
    memory is kept from step to step, but with sharded weights the sum of one microbatch is the gradient itself. With
    sharded gradients, each of the ranks contributes to the shards of a rank, so that it has as much as unsharded ones.
    """
    count = choice.microbatches_per_rank
    is_aligned = count & (count - 1) == 0 or choice.layout.dp_size == 1  # else ranks begin within a sum
    sums = count.bit_length() + (0 if is_aligned else 1 if zero_stage < 2 else 0.5)
    return sums if zero_stage == 0 else sums - 1


def _estimate_audit(workload: Workload, layout: Layout, full: MemoryFootprint) -> MemoryFootprint:
    """Return the footprint of a rank while it audits an update, when activations are gone.

    It copies a part of the state, and gives the copy moments; under ZeRO the part was received from another rank. The
    updates of all matrices of Muon are kept.
    """
    part = min(AUDIT_PART_BYTES, full.weights + full.gradients + full.moments)
    working = part * (2.5 if layout.zero and layout.dp_shard > 1 else 1.5)
    if workload.optimizer == "muon":
        working += full.weights
    return replace(full, activations=0, working=int(working))


def _compute_head_bytes(workload: Workload, tokens: float, tp: int, residual_itemsize: int) -> float:
    """Return the bytes of logits, loss and last norm at the start of the backward pass.

    Kept are the input and output of the last norm, and each logit in the compute dtype. In the state dtype the loss
    adds two values per logit, or three if the whole vocabulary is on one rank. A compiled loss instead keeps the logit
    and its gradient in the compute dtype, a third value if the vocabulary is padded to whole tiles, and the gradient of
    the head's weights. In chunks, or compiled with a sharded vocabulary, the gradients of the head's input and weights
    are complete, and the logits are those of one chunk: twice in the compute dtype, and if not compiled twice in the
    state dtype.
    """
    spec, state_itemsize, itemsize = workload.spec, workload.state_itemsize, workload.compute_itemsize
    norm_bytes = tokens * spec.hidden_size * (residual_itemsize / tp + itemsize)
    logits = tokens * spec.vocab_size / tp
    if workload.loss_chunks > 1 or (workload.compiled and tp > 1):
        grads = tokens * spec.hidden_size * itemsize + _count_head_elements(workload, tp) * state_itemsize
        logit_bytes = 2 * itemsize + (0 if workload.compiled else 2 * state_itemsize)
        return norm_bytes + grads + logits / workload.loss_chunks * logit_bytes
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
