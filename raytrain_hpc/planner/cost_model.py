"""Cost model: estimated step time by component: compute, communication, pipeline bubble, gradients, optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

from raytrain_hpc.planner import comm_volume
from raytrain_hpc.planner.activation_memory import (
    Recompute,
    compute_layer_bytes_per_token,
    compute_offloaded_bytes,
)
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters, get_largest
from raytrain_hpc.planner.pipeline_schedule import Action, PipelineSchedule, ScheduleName
from raytrain_hpc.planner.pipeline_timeline import simulate
from raytrain_hpc.planner.product_cost import BACKWARD_ATTENTION, ProductCost
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload

# Per logit in bf16: cast to fp32 (6), softmax (8), gradient in place (8), cast back (6).
_LOGIT_BYTES = 28
_COMPILED_LOGIT_BYTES = 10  # write (2), read for maximum and sum (4), gradient in one pass (4)
# Bytes moved per weight and microbatch where products cast weights, besides the sum of gradients in fp32 (8): the cast
# (6), a gradient written in bf16 and widened (8), and read for the sum (4). With copies: a gradient written and read in
# bf16 (4) per microbatch, and the copy per step (6).
_WEIGHT_CAST_BYTES, _BF16_GRADIENT_BYTES, _WEIGHT_COPY_BYTES = 18, 4, 6
_HOST_GBS = 25.0  # a device's share of host memory bandwidth, for offloaded optimizer steps and activations
_DISK_GBS = 2.0
_OPTIMIZER_ACCESSES_PER_PARAMETER = 10  # elements read or written per parameter: norm 1, scaling 2, AdamW 7
# Bytes moved per parameter to read and write both moments, in fp32 and in bf16. In bf16 they are also written in fp32,
# read and written by the kernel, and read to be rounded, where they are updated.
_MOMENT_BYTES, _BF16_MOMENT_BYTES, _WIDE_MOMENT_BYTES = 16, 8, 32


@dataclass(frozen=True)
class StepCost:
    """Seconds per step by component. Only communication that is not overlapped counts."""

    compute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float  # time in which the pipeline fills and drains
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds per step."""
        communication = self.tensor + self.context + self.experts + self.pipeline + self.data
        return self.compute + communication + self.bubble + self.optimizer


@dataclass(frozen=True)
class _PassCost:
    """Seconds of the forward and backward pass of one microbatch, through one layer or through a rank's stages."""

    forward: float
    backward: float
    tensor: float = 0.0  # communication of both passes
    context: float = 0.0
    experts: float = 0.0

    def add(self, other: _PassCost, count: int) -> _PassCost:
        """Return the cost with `count` times the other one added."""
        return _PassCost(
            self.forward + count * other.forward,
            self.backward + count * other.backward,
            self.tensor + count * other.tensor,
            self.context + count * other.context,
            self.experts + count * other.experts,
        )

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.experts


class CostModel:
    """Estimator of the step time of a workload on a calibrated machine. Caches results for a layout search."""

    def __init__(self, workload: Workload, machine: Machine, calibration: Calibration):
        self._workload, self._machine, self._calibration = workload, machine, calibration
        self._products = ProductCost(workload, machine.device, calibration)
        self._get_layer_cost = cache(self._estimate_layer)
        self._stages = StageCache(workload)

    def estimate_step(self, choice: LayoutChoice) -> StepCost:
        """Estimate the cost of one step with this layout choice.

        The slowest pipeline rank sets the pace of all microbatches. The bubble is the time in which the pipeline fills
        and drains, which some schedules fill in part. Casts of weights and gradient accumulation move bytes of each
        weight once per microbatch. Data-parallel communication overlaps with the last backward pass under ZeRO-0 and 1,
        with all backward passes under ZeRO-2, and with all passes under ZeRO-3.
        """
        workload, machine, layout, microbatches = (
            self._workload,
            self._machine,
            choice.layout,
            choice.microbatches_per_rank,
        )
        passes, rank_parameters = (
            self._estimate_passes_by_rank(choice),
            get_largest(self._stages.get_parameters(layout)),
        )
        slowest = max(passes, key=lambda rank_pass: rank_pass.total)
        bubble = _compute_bubble(layout, microbatches) * sum(rank_pass.total for rank_pass in passes) / len(passes)
        pipeline_s = 0.0
        if layout.pp > 1:
            message_bytes = comm_volume.compute_pp_bytes(
                workload, choice.batching.size * workload.seq_len / layout.cp, layout.tp
            )
            transfers_s = (
                2
                * layout.pipeline.stages_per_rank
                * machine.estimate_transfer_s(message_bytes, across=machine.nodes > 1)
            )
            pipeline_s = transfers_s * (microbatches * (1 - self._calibration.exchanges_hidden) + layout.pp - 1)
        return StepCost(
            compute=microbatches * slowest.compute + self._estimate_weights_s(choice, rank_parameters),
            tensor=microbatches * slowest.tensor,
            context=microbatches * slowest.context,
            experts=microbatches * slowest.experts,
            pipeline=pipeline_s + self._estimate_tied_s(layout),
            bubble=bubble,
            data=self._estimate_dp_s(choice, rank_parameters, slowest),
            optimizer=self._estimate_optimizer_s(choice, rank_parameters),
        )

    def compute_mfu(self, seconds: float, *, causal: bool = True) -> float:
        """Return the model FLOPs utilization of a step of `seconds`. See planner/flops.py for the FLOPs counted."""
        workload, machine = self._workload, self._machine
        flops = (
            compute_flops_per_token(workload.spec, workload.seq_len, causal=causal)
            * workload.global_batch_size
            * workload.seq_len
        )
        return flops / (seconds * machine.num_devices * machine.device.tflops * 1e12)

    def _estimate_weights_s(self, choice: LayoutChoice, rank_parameters: RankParameters) -> float:
        """Estimate the casts of weights and the accumulation of their gradients in a step."""
        workload, layout, microbatches = self._workload, choice.layout, choice.microbatches_per_rank
        # FSDP2 casts the weights once per step, or as it gathers them.
        is_cast = workload.compute_itemsize < workload.state_itemsize and layout.dp_shard == 1
        parameters, moved_bytes = (rank_parameters.dense, rank_parameters.experts), 0.0
        for count, is_copied in zip(parameters, workload.keeps_weight_copies(choice), strict=True):
            cast_bytes = _BF16_GRADIENT_BYTES if is_copied else is_cast * _WEIGHT_CAST_BYTES
            moved_bytes += count * microbatches * (2 * workload.state_itemsize + cast_bytes)
            moved_bytes += count * is_copied * _WEIGHT_COPY_BYTES
        return moved_bytes / (self._machine.device.memory_gbs * 1e9)

    def _estimate_passes_by_rank(self, choice: LayoutChoice) -> list[_PassCost]:
        """Estimate, for each pipeline rank, the passes of a microbatch through its stages."""
        layout, size = choice.layout, choice.batching.size
        kept, recomputed = (
            self._get_layer_cost(
                layout.tp,
                layout.cp,
                layout.ulysses,
                layout.ep,
                size,
                policy,
                choice.activation_offload == "cpu",
                self._workload.get_residual_itemsize(layout),
            )
            for policy in ("none", choice.recompute)
        )
        head, pipeline, passes = self._estimate_head_s(layout, size), layout.pipeline, []
        stages = self._stages.get_layer_counts(pipeline.num_stages)
        for rank in range(pipeline.num_ranks):
            own_stages = pipeline.get_stages_of_rank(rank)
            layers, has_head = sum(stages[stage] for stage in own_stages), pipeline.num_stages - 1 in own_stages
            num_recomputed = sum(choice.count_recomputed_layers(stages[stage]) for stage in own_stages)
            head_cost = _PassCost(has_head * head / 3, has_head * head * 2 / 3)
            passes.append(head_cost.add(kept, layers - num_recomputed).add(recomputed, num_recomputed))
        return passes

    def _estimate_layer(
        self,
        tp: int,
        cp: int,
        ulysses: int,
        ep: int,
        micro_batch_size: int,
        recompute: Recompute,
        offloaded: bool,
        residual_itemsize: int,
    ) -> _PassCost:
        """Estimate a layer. Offloaded activations are copied during each pass, which waits for them if that is slower.

        Copies of a layer overlap with the pass of the next one.
        """
        workload, calibration = self._workload, self._calibration
        spec, tokens = workload.spec, micro_batch_size * workload.seq_len / cp
        matmuls = self._products.estimate_layer(tokens, tp)
        attention = self._products.estimate_attention(tokens, tp)
        kept_bytes, recomputed_bytes = (
            compute_layer_bytes_per_token(
                spec,
                tp=tp,
                dtype=workload.dtype,
                recompute=policy,
                compiled=workload.compiled,
                residual_itemsize=residual_itemsize,
            )
            for policy in ("none", recompute)
        )
        # Rows travel to their experts and back: about three accesses in the forward pass, and twice as many backward.
        routed_bytes = 3 * spec.experts_per_token * spec.hidden_size / tp * workload.compute_itemsize
        elementwise = tokens * (kept_bytes + routed_bytes) / (self._machine.device.memory_gbs * 1e9)
        forward = matmuls + attention + elementwise
        recompute_s = {"none": 0.0, "selective": elementwise, "full": forward + calibration.layer_s}[recompute]
        backward = (
            2 * matmuls + BACKWARD_ATTENTION * attention + 2 * elementwise + 1.5 * calibration.layer_s + recompute_s
        )
        exposed_fraction = 1 - calibration.exchanges_hidden
        input_bytes = residual_itemsize * spec.hidden_size / tp
        moved_bytes = compute_offloaded_bytes(
            recomputed_bytes, input_bytes, recompute=recompute, compiled=workload.compiled
        )
        copy_s = tokens * moved_bytes / (_HOST_GBS * 1e9) if offloaded else 0.0
        return _PassCost(
            max(forward + calibration.layer_s, copy_s),
            max(backward, copy_s),
            exposed_fraction * self._estimate_tp_s(tokens, tp, recompute=recompute == "full"),
            exposed_fraction * self._estimate_cp_s(micro_batch_size, tp, cp, ulysses),
            exposed_fraction * self._estimate_ep_s(tokens, tp, ep),
        )

    def _estimate_head_s(self, layout: Layout, size: int) -> float:
        """Estimate the seconds of head and loss, forward and backward."""
        spec, tokens = self._workload.spec, size * self._workload.seq_len / layout.cp
        rows = spec.vocab_size / layout.tp
        matmul = self._products.estimate(tokens, spec.hidden_size, rows, is_float8=self._workload.float8_head)
        logit_bytes = _COMPILED_LOGIT_BYTES if self._workload.compiled else _LOGIT_BYTES
        return 3 * matmul + logit_bytes * tokens * rows / (self._machine.device.memory_gbs * 1e9)

    def _estimate_tied_s(self, layout: Layout) -> float:
        """Estimate the all-reduce of the gradients of a tied embedding, between the first and the last stage."""
        spec, pipeline = self._workload.spec, layout.pipeline
        if not spec.tie_embeddings or pipeline.num_stages - 1 in pipeline.get_stages_of_rank(0):
            return 0.0
        table_bytes = spec.vocab_size * spec.hidden_size / layout.tp * self._workload.state_itemsize
        return self._machine.estimate_collective_s("all_reduce", table_bytes, 2, 1 if self._machine.nodes > 1 else 2)

    def _estimate_tp_s(self, tokens: float, tp: int, *, recompute: bool) -> float:
        """Estimate the tensor-parallel collectives of a layer in both passes, and in a recomputed forward pass."""
        bytes_sent = comm_volume.compute_tp_bytes(self._workload, tokens, tp)
        collective_s = self._machine.estimate_collective_s("gather", bytes_sent, tp, min(tp, self._machine.per_node))
        return comm_volume.TP_COLLECTIVES_PER_LAYER_PASS * (3 if recompute else 2) * collective_s

    def _estimate_cp_s(self, size: int, tp: int, cp: int, ulysses: int) -> float:
        """Estimate the context-parallel communication of a layer.

        Ulysses exchanges queries, keys, values and outputs in both passes. The ring passes keys and values around once
        in the forward pass, and with their gradients in the backward pass.
        """
        tokens, ring_size = size * self._workload.seq_len / cp, cp // ulysses
        ranks_per_node, seconds = max(1, self._machine.per_node // tp), 0.0
        if ulysses > 1:
            bytes_sent = comm_volume.compute_ulysses_bytes(self._workload, tokens, tp, ulysses)
            seconds += 2 * self._machine.estimate_collective_s(
                "gather", bytes_sent, ulysses, min(ulysses, ranks_per_node)
            )
        if ring_size > 1:
            bytes_sent = comm_volume.compute_ring_bytes(self._workload, tokens, tp)
            seconds += 3 * (ring_size - 1) * self._machine.estimate_transfer_s(bytes_sent, across=cp > ranks_per_node)
        return seconds

    def _estimate_ep_s(self, tokens: float, tp: int, ep: int) -> float:
        """Estimate the all-to-alls of a layer to and from its experts, in both passes."""
        bytes_sent, ranks_per_node = (
            comm_volume.compute_ep_bytes(self._workload, tokens, tp, ep),
            max(1, min(ep, self._machine.per_node // tp)),
        )
        return comm_volume.EP_ALL_TO_ALLS_PER_LAYER * self._machine.estimate_collective_s(
            "gather", bytes_sent, ep, ranks_per_node
        )

    def _estimate_dp_s(self, choice: LayoutChoice, rank_parameters: RankParameters, pass_cost: _PassCost) -> float:
        """Estimate the communication of gradients and weights between data-parallel ranks that is not overlapped."""
        layout, dense, stride = choice.layout, rank_parameters.dense, choice.layout.cp * choice.layout.tp
        gathered_bytes = comm_volume.compute_gathered_bytes(self._workload, dense, layout.tp)
        seconds = self._estimate_dp_collectives_s(
            choice, dense, gathered_bytes, layout.dp_shard, layout.num_state_replicas, stride
        )
        if rank_parameters.experts:
            sizes = (
                layout.expert_axis_sizes
                if layout.ep > 1
                else {"dp_shard": layout.dp_shard, "copies": layout.num_state_replicas}
            )
            experts, stride = rank_parameters.experts, layout.tp * layout.ep
            gathered_bytes = experts * self._workload.compute_itemsize
            seconds += self._estimate_dp_collectives_s(
                choice, experts, gathered_bytes, sizes["dp_shard"], sizes["copies"], stride
            )
        window = pass_cost.backward if layout.zero < 2 else choice.microbatches_per_rank * pass_cost.backward
        if layout.zero == 3:
            window = choice.microbatches_per_rank * pass_cost.compute
        return seconds - self._calibration.gradients_hidden * min(seconds, window)

    def _estimate_dp_collectives_s(
        self, choice: LayoutChoice, parameters: int, gathered_bytes: float, shards: int, copies: int, stride: int
    ) -> float:
        """Estimate the collectives per step for `parameters` parameters of a rank, over its shards and its copies.

        Gradients have the itemsize of the state. ZeRO-1 reduce-scatters gradients and all-gathers weights once per
        step. ZeRO-2 reduce-scatters in every microbatch, and ZeRO-3 also all-gathers twice in each (Rajbhandari et al.
        2020, arXiv 1910.02054). `gathered_bytes`: of all parameters together. `stride`: distance in ranks between
        adjacent shards.
        """
        workload, machine, microbatches, zero = (
            self._workload,
            self._machine,
            choice.microbatches_per_rank,
            choice.layout.zero,
        )
        seconds = 0.0
        if shards > 1:
            ranks_per_node = max(1, min(shards, machine.per_node // stride))
            sharded_parameters = parameters * (shards - 1) / shards
            scatter = machine.estimate_collective_s(
                "gather", sharded_parameters * workload.state_itemsize, shards, ranks_per_node
            )
            gather = machine.estimate_collective_s(
                "gather", gathered_bytes * (shards - 1) / shards, shards, ranks_per_node
            )
            seconds += scatter * (microbatches if zero >= 2 else 1) + gather * (2 * microbatches if zero == 3 else 1)
        if copies > 1:
            replica_stride = stride * shards if shards > 1 else max(1, stride // choice.layout.cp)
            ranks_per_node = max(1, min(copies, machine.per_node // replica_stride))
            bytes_sent = 2 * parameters / shards * workload.state_itemsize * (copies - 1) / copies
            seconds += machine.estimate_collective_s("all_reduce", bytes_sent, copies, ranks_per_node) * (
                microbatches if zero >= 2 else 1
            )
        return seconds

    def _estimate_optimizer_s(self, choice: LayoutChoice, rank_parameters: RankParameters) -> float:
        """Estimate gradient clipping and the optimizer step, which read and write a rank's own state once.

        Offloaded state moves at the speed of host memory or disk.
        """
        layout = choice.layout
        shards = layout.dp_shard if layout.zero else 1
        expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else shards
        parameters = rank_parameters.dense / shards + rank_parameters.experts / expert_shards
        gbs = {"none": self._machine.device.memory_gbs, "cpu": _HOST_GBS, "disk": _DISK_GBS}[choice.offload]
        moved_bytes = float(_OPTIMIZER_ACCESSES_PER_PARAMETER * self._workload.state_itemsize)
        if self._workload.moment_dtype == "bf16":
            # Moments on disk are widened in host memory.
            wide_gbs = _HOST_GBS if choice.offload == "disk" else gbs
            moved_bytes += _BF16_MOMENT_BYTES - _MOMENT_BYTES + _WIDE_MOMENT_BYTES * gbs / wide_gbs
        return parameters * moved_bytes / (gbs * 1e9)


@lru_cache(maxsize=4096)
def _simulate_bubble(schedule: ScheduleName, num_ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """Return the bubble in units of a rank's forward and backward pass, with equal ranks and backward twice forward."""
    pipeline = PipelineSchedule(schedule, num_ranks, stages_per_rank)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def get_duration(action: Action) -> float:
        return seconds[action.kind] / (3 * stages_per_rank)

    spans = simulate(pipeline.build_orders(microbatches), get_duration, pipeline.num_stages)
    return max(span.end for span in spans) - microbatches


def _compute_bubble(layout: Layout, microbatches: int) -> float:
    """Return the bubble in units of a rank's forward and backward pass."""
    if layout.pp == 1:
        return 0.0
    if layout.schedule in ("gpipe", "1f1b"):
        return layout.pp - 1.0
    pipeline = layout.pipeline
    return _simulate_bubble(
        layout.schedule, layout.pp, pipeline.stages_per_rank, pipeline.get_representative_microbatches(microbatches)
    )
