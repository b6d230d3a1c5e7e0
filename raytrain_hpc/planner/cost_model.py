"""How long a step takes, and where the time goes: compute, exchanges, the pipeline's gaps, gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from raytrain_hpc.planner import comm_volume
from raytrain_hpc.planner.activation_memory import Recompute, compute_layer_bytes_per_token
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters, get_largest
from raytrain_hpc.planner.pipeline_schedule import Action, PipelineSchedule, ScheduleName
from raytrain_hpc.planner.pipeline_timeline import simulate
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload

_ATTENTION_EFFICIENCY = 0.7  # of what matrix products reach, by fused attention
_HALF_EFFICIENCY_WIDTH = (
    50.0  # width at which a product reaches half of what large ones do: its tiles do not fill the device
)
# Moved a logit in bf16: cast to fp32 (6), made a probability (8) and that, in its place, a gradient (8), cast back (6).
_LOGIT_BYTES = 28
_COMPILED_LOGIT_BYTES = 10  # written (2), read for the largest and their sum (4), made a gradient in one pass (4)
_COMPILE_SPEEDUP = 1.18  # more of the peak where blocks are compiled: little stands between their products (RESULTS.md)
_MAX_EFFICIENCY = 0.9  # of the peak, whatever is calibrated
_HOST_GBS = 25.0  # a device's share of its host's memory, over which the CPU steps what is offloaded
_DISK_GBS = 2.0
_OPTIMIZER_ACCESSES_PER_PARAMETER = (
    10  # elements a parameter that clipping and AdamW read and write: norm 1, scale 2, step 7
)


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step. `bubble`: the pipeline's gaps. Exchanges count as far as they are not hidden."""

    compute: float
    tensor: float
    context: float
    experts: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        """Of the whole step."""
        exchanged = self.tensor + self.context + self.experts + self.pipeline + self.data
        return self.compute + exchanged + self.bubble + self.optimizer


@dataclass(frozen=True)
class _PassCost:
    """Seconds of a forward and a backward pass of one microbatch: through one layer, or through a rank's part."""

    forward: float
    backward: float
    tensor: float = 0.0  # exchanges, both ways together
    context: float = 0.0
    experts: float = 0.0

    @property
    def compute(self) -> float:
        return self.forward + self.backward

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.experts


class CostModel:
    """Steps of this work on this machine, as it has been calibrated. Remembers what recurs in a search."""

    def __init__(self, workload: Workload, machine: Machine, calibration: Calibration):
        self._workload, self._machine, self._calibration = workload, machine, calibration
        device = machine.device
        self._peak_flops = (device.tflops if workload.dtype == "bf16" else device.exact_tflops) * 1e12
        self._achieved_flops = self._peak_flops * min(
            _MAX_EFFICIENCY, calibration.efficiency * (_COMPILE_SPEEDUP if workload.compiled else 1.0)
        )
        self._get_layer_cost = cache(self._estimate_layer)
        self._stages = StageCache(workload)

    def estimate_step(self, choice: LayoutChoice) -> StepCost:
        """One step, done so.

        The slowest pipeline rank sets the pace of all microbatches; the way of the first one there and of the last one
        back is the gap, which schedules fill in part. The step's gradients are read and written again for every
        microbatch. Data-parallel traffic of ZeRO-0 and 1 can hide behind the last backward pass, that of ZeRO-2 behind
        all of these and of ZeRO-3 behind all passes.
        """
        work, machine, layout, turns = self._workload, self._machine, choice.layout, choice.microbatches_per_rank
        parts, own = self._estimate_passes_by_rank(choice), get_largest(self._stages.get_parameters(layout))
        slowest = max(parts, key=lambda part: part.total)
        gap = _compute_bubble(layout, turns) * sum(part.total for part in parts) / len(parts)
        sent = 0.0
        if layout.pp > 1:
            size = comm_volume.compute_pp_bytes(work, choice.batching.size * work.seq_len / layout.cp, layout.tp)
            one = 2 * layout.pipeline.stages_per_rank * machine.estimate_transfer_s(size, across=machine.nodes > 1)
            sent = one * (turns * (1 - self._calibration.exchanges_hidden) + layout.pp - 1)
        added = (own.dense + own.experts) * 2 * work.state_itemsize / (machine.device.memory_gbs * 1e9)
        return StepCost(
            compute=turns * (slowest.compute + added),
            tensor=turns * slowest.tensor,
            context=turns * slowest.context,
            experts=turns * slowest.experts,
            pipeline=sent + self._estimate_tied_s(layout),
            bubble=gap,
            data=self._estimate_dp_s(choice, own, slowest),
            optimizer=self._estimate_optimizer_s(choice, own),
        )

    def compute_mfu(self, seconds: float, *, causal: bool = True) -> float:
        """Model FLOPs utilisation of a step of so many seconds; see plan.flops for what is counted."""
        work, machine = self._workload, self._machine
        flops = compute_flops_per_token(work.shape, work.seq_len, causal=causal) * work.global_batch * work.seq_len
        return flops / (seconds * machine.num_devices * machine.device.tflops * 1e12)

    def _estimate_passes_by_rank(self, choice: LayoutChoice) -> list[_PassCost]:
        """What each pipeline rank has to do for a microbatch."""
        layout, size = choice.layout, choice.batching.size
        layer = self._get_layer_cost(layout.tp, layout.cp, layout.ulysses, layout.ep, size, choice.recompute)
        head, pipeline, parts = self._estimate_head_s(layout, size), layout.pipeline, []
        stages = self._stages.get_layer_counts(pipeline.num_stages)
        for rank in range(pipeline.num_ranks):
            mine = pipeline.get_stages_of_rank(rank)
            layers, last = sum(stages[stage] for stage in mine), pipeline.num_stages - 1 in mine
            parts.append(
                _PassCost(
                    layers * layer.forward + last * head / 3,
                    layers * layer.backward + last * head * 2 / 3,
                    layers * layer.tensor,
                    layers * layer.context,
                    layers * layer.experts,
                )
            )
        return parts

    def _estimate_layer(self, tp: int, cp: int, ulysses: int, ep: int, size: int, recompute: Recompute) -> _PassCost:
        work, calibration = self._workload, self._calibration
        shape, tokens = work.shape, size * work.seq_len / cp
        products = sum(self._estimate_matmul_s(*product) for product in self._iter_matmuls(tokens, tp))
        # Fused causal attention computes half of the square of scores; backward two and a half times as much.
        attention = (
            2 * tokens * work.seq_len * shape.attention_size / tp / (self._achieved_flops * _ATTENTION_EFFICIENCY)
        )
        kept = compute_layer_bytes_per_token(shape, tp=tp, dtype=work.dtype, recompute="none", compiled=work.compiled)
        elementwise = tokens * kept / (self._machine.device.memory_gbs * 1e9)
        forward = products + attention + elementwise
        again = {"none": 0.0, "selective": elementwise, "full": forward + calibration.layer_s}[recompute]
        backward = 2 * products + 2.5 * attention + 2 * elementwise + 1.5 * calibration.layer_s + again
        shown = 1 - calibration.exchanges_hidden
        return _PassCost(
            forward + calibration.layer_s,
            backward,
            shown * self._estimate_tp_s(tokens, tp, recompute=recompute == "full"),
            shown * self._estimate_cp_s(size, tp, cp, ulysses),
            shown * self._estimate_ep_s(tokens, tp, ep),
        )

    def _iter_matmuls(self, tokens: float, tp: int) -> Iterator[tuple[float, float, float]]:
        """(rows, inputs, outputs) of the matrix products of a layer on a rank; several alike as one with all rows."""
        shape = self._workload.shape
        h, ups = shape.hidden_size, shape.num_ffn_matrices - 1
        yield tokens, h, (shape.attention_size + 2 * shape.kv_size) / tp
        yield tokens, shape.attention_size / tp, h
        widths = [(tokens, shape.shared_expert_size if shape.num_experts else shape.ffn_size)]
        if shape.num_experts:
            widths.append((tokens * shape.experts_per_token, shape.ffn_size))
        for rows, width in widths:
            if width:
                yield rows, h, ups * width / tp
                yield rows, width / tp, h

    def _estimate_matmul_s(self, rows: float, inputs: float, outputs: float) -> float:
        narrowest = min(rows, inputs, outputs)
        return 2 * rows * inputs * outputs / (self._achieved_flops * narrowest / (narrowest + _HALF_EFFICIENCY_WIDTH))

    def _estimate_head_s(self, layout: Layout, size: int) -> float:
        """Seconds of the head and the loss, there and back."""
        shape, tokens = self._workload.shape, size * self._workload.seq_len / layout.cp
        rows = shape.vocab_size / layout.tp
        product = self._estimate_matmul_s(tokens, shape.hidden_size, rows)
        moved = _COMPILED_LOGIT_BYTES if self._workload.compiled else _LOGIT_BYTES
        return 3 * product + moved * tokens * rows / (self._machine.device.memory_gbs * 1e9)

    def _estimate_tied_s(self, layout: Layout) -> float:
        """A table that is the first stage's and the last one's has its gradients summed over both once a step."""
        shape, pipeline = self._workload.shape, layout.pipeline
        if not shape.tie_embeddings or pipeline.num_stages - 1 in pipeline.get_stages_of_rank(0):
            return 0.0
        size = shape.vocab_size * shape.hidden_size / layout.tp * self._workload.state_itemsize
        return self._machine.estimate_collective_s("all_reduce", size, 2, 1 if self._machine.nodes > 1 else 2)

    def _estimate_tp_s(self, tokens: float, tp: int, *, recompute: bool) -> float:
        """Exchanges of the residual stream, in both passes and where the forward one is done again."""
        sent = comm_volume.compute_tp_bytes(self._workload, tokens, tp)
        one = self._machine.estimate_collective_s("gather", sent, tp, min(tp, self._machine.per_node))
        return comm_volume.TP_COLLECTIVES_PER_LAYER_PASS * (3 if recompute else 2) * one

    def _estimate_cp_s(self, size: int, tp: int, cp: int, ulysses: int) -> float:
        """Ulysses: two exchanges a pass of queries, keys, values and results. Ring: keys and values once around, and in
        the backward pass their gradients too."""
        tokens, ring = size * self._workload.seq_len / cp, cp // ulysses
        a_node, seconds = max(1, self._machine.per_node // tp), 0.0
        if ulysses > 1:
            sent = comm_volume.compute_ulysses_bytes(self._workload, tokens, tp, ulysses)
            seconds += 2 * self._machine.estimate_collective_s("gather", sent, ulysses, min(ulysses, a_node))
        if ring > 1:
            sent = comm_volume.compute_ring_bytes(self._workload, tokens, tp)
            seconds += 3 * (ring - 1) * self._machine.estimate_transfer_s(sent, across=cp > a_node)
        return seconds

    def _estimate_ep_s(self, tokens: float, tp: int, ep: int) -> float:
        """Rows go to their experts and come back, in both passes."""
        sent, a_node = (
            comm_volume.compute_ep_bytes(self._workload, tokens, tp, ep),
            max(1, min(ep, self._machine.per_node // tp)),
        )
        return comm_volume.EP_ALL_TO_ALLS_PER_LAYER * self._machine.estimate_collective_s("gather", sent, ep, a_node)

    def _estimate_dp_s(self, choice: LayoutChoice, rank_parameters: RankParameters, pass_cost: _PassCost) -> float:
        """What gradients and weights of data-parallel ranks take beyond what is hidden."""
        layout = choice.layout
        seconds = self._estimate_dp_collectives_s(
            choice, rank_parameters.dense, layout.dp_shard, layout.num_state_replicas, layout.cp * layout.tp
        )
        if rank_parameters.experts:
            sizes = (
                layout.expert_axis_sizes
                if layout.ep > 1
                else {"dp_shard": layout.dp_shard, "copies": layout.num_state_replicas}
            )
            stride = layout.tp * layout.ep
            seconds += self._estimate_dp_collectives_s(
                choice, rank_parameters.experts, sizes["dp_shard"], sizes["copies"], stride
            )
        window = pass_cost.backward if layout.zero < 2 else choice.microbatches_per_rank * pass_cost.backward
        if layout.zero == 3:
            window = choice.microbatches_per_rank * pass_cost.compute
        return seconds - self._calibration.gradients_hidden * min(seconds, window)

    def _estimate_dp_collectives_s(
        self, choice: LayoutChoice, parameters: int, shards: int, copies: int, stride: int
    ) -> float:
        """Seconds of a step's collectives for so many parameters of a rank, over its shards and its copies.

        A gradient's bytes are those of the state. ZeRO-1 reduce-scatters gradients and gathers weights once, ZeRO-2
        reduce-scatters in every microbatch, ZeRO-3 also gathers twice in each (Rajbhandari et al. 2020, arXiv
        1910.02054). `stride`: how far apart neighbouring shards stand.
        """
        work, machine, turns, zero = self._workload, self._machine, choice.microbatches_per_rank, choice.layout.zero
        seconds = 0.0
        if shards > 1:
            a_node = max(1, min(shards, machine.per_node // stride))
            moved = parameters * (shards - 1) / shards
            scatter = machine.estimate_collective_s("gather", moved * work.state_itemsize, shards, a_node)
            gather = machine.estimate_collective_s("gather", moved * work.compute_itemsize, shards, a_node)
            seconds += scatter * (turns if zero >= 2 else 1) + gather * (2 * turns if zero == 3 else 1)
        if copies > 1:
            apart = stride * shards if shards > 1 else max(1, stride // choice.layout.cp)
            a_node = max(1, min(copies, machine.per_node // apart))
            sent = 2 * parameters / shards * work.state_itemsize * (copies - 1) / copies
            seconds += machine.estimate_collective_s("all_reduce", sent, copies, a_node) * (turns if zero >= 2 else 1)
        return seconds

    def _estimate_optimizer_s(self, choice: LayoutChoice, rank_parameters: RankParameters) -> float:
        """Clipping and the step go over a rank's own state once; host memory and disks are slower than a device's."""
        layout = choice.layout
        shards = layout.dp_shard if layout.zero else 1
        expert_shards = layout.expert_axis_sizes["dp_shard"] if layout.ep > 1 else shards
        parameters = rank_parameters.dense / shards + rank_parameters.experts / expert_shards
        speed = {"none": self._machine.device.memory_gbs, "cpu": _HOST_GBS, "disk": _DISK_GBS}[choice.offload]
        return parameters * _OPTIMIZER_ACCESSES_PER_PARAMETER * self._workload.state_itemsize / (speed * 1e9)


@lru_cache(maxsize=4096)
def _simulate_bubble(schedule: ScheduleName, num_ranks: int, stages_per_rank: int, microbatches: int) -> float:
    """The gap in passes there and back of a rank, forward being a third of one. Equal ranks."""
    pipeline = PipelineSchedule(schedule, num_ranks, stages_per_rank)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def of(action: Action) -> float:
        return seconds[action.kind] / (3 * stages_per_rank)

    spans = simulate(pipeline.build_orders(microbatches), of, pipeline.num_stages)
    return max(span.end for span in spans) - microbatches


def _compute_bubble(layout: Layout, microbatches: int) -> float:
    """How many of its own passes a pipeline rank waits in a step."""
    if layout.pp == 1:
        return 0.0
    if layout.schedule in ("gpipe", "1f1b"):
        return layout.pp - 1.0
    pipeline = layout.pipeline
    return _simulate_bubble(
        layout.schedule, layout.pp, pipeline.stages_per_rank, pipeline.get_representative_microbatches(microbatches)
    )
