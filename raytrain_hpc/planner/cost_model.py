"""How long a step takes, and where the time goes: compute, exchanges, the pipeline's gaps, gradients, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

from raytrain_hpc.planner import comm_volume
from raytrain_hpc.planner.activation_memory import Recompute, layer_bytes_per_token
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import flops_per_token
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.model_state_memory import RankParameters, most
from raytrain_hpc.planner.pipeline_schedule import Action, Name, Schedule
from raytrain_hpc.planner.pipeline_timeline import simulate
from raytrain_hpc.planner.stage_cache import Shares
from raytrain_hpc.planner.workload import Choice, Work

_ATTENTION = 0.7  # of what matrix products reach, by fused attention
_NARROW = 50.0  # width at which a product reaches half of what large ones do: its tiles do not fill the device
# Moved a logit in bf16: cast to fp32 (6), made a probability (8) and that, in its place, a gradient (8), cast back (6).
_LOGIT_BYTES = 28
_COMPILED_LOGIT_BYTES = 10  # written (2), read for the largest and their sum (4), made a gradient in one pass (4)
_COMPILED = 1.18  # more of the peak where blocks are compiled: little stands between their products (RESULTS.md)
_MOST = 0.9  # of the peak, whatever is calibrated
_HOST_GBS = 25.0  # a device's share of its host's memory, over which the CPU steps what is offloaded
_DISK_GBS = 2.0
_STATE_TRAFFIC = 10  # elements a parameter that clipping and AdamW read and write: norm 1, scale 2, step 7


@dataclass(frozen=True)
class Cost:
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
class _Pass:
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

    def __init__(self, work: Work, machine: Machine, calibration: Calibration):
        self._work, self._machine, self._calibration = work, machine, calibration
        device = machine.device
        self._peak = (device.tflops if work.dtype == "bf16" else device.exact_tflops) * 1e12
        self._reached = self._peak * min(_MOST, calibration.efficiency * (_COMPILED if work.compiled else 1.0))
        self._layer = cache(self._layer_pass)
        self._shares = Shares(work)

    def step(self, choice: Choice) -> Cost:
        """One step, done so.

        The slowest pipeline rank sets the pace of all microbatches; the way of the first one there and of the last one
        back is the gap, which schedules fill in part. The step's gradients are read and written again for every
        microbatch. Data-parallel traffic of ZeRO-0 and 1 can hide behind the last backward pass, that of ZeRO-2 behind
        all of these and of ZeRO-3 behind all passes.
        """
        work, machine, layout, turns = self._work, self._machine, choice.layout, choice.turns
        parts, own = self._parts(choice), most(self._shares.parameters(layout))
        slowest = max(parts, key=lambda part: part.total)
        gap = _gap(layout, turns) * sum(part.total for part in parts) / len(parts)
        sent = 0.0
        if layout.pp > 1:
            size = comm_volume.of_stage(work, choice.batching.size * work.seq_len / layout.cp, layout.tp)
            one = 2 * layout.pipeline.per_rank * machine.transfer_s(size, across=machine.nodes > 1)
            sent = one * (turns * (1 - self._calibration.exchanges_hidden) + layout.pp - 1)
        added = (own.dense + own.experts) * 2 * work.state_width / (machine.device.memory_gbs * 1e9)
        return Cost(
            compute=turns * (slowest.compute + added),
            tensor=turns * slowest.tensor,
            context=turns * slowest.context,
            experts=turns * slowest.experts,
            pipeline=sent + self._tied_s(layout),
            bubble=gap,
            data=self._data_parallel(choice, own, slowest),
            optimizer=self._optimizer(choice, own),
        )

    def utilisation(self, seconds: float, *, causal: bool = True) -> float:
        """Model FLOPs utilisation of a step of so many seconds; see plan.flops for what is counted."""
        work, machine = self._work, self._machine
        flops = flops_per_token(work.shape, work.seq_len, causal=causal) * work.global_batch * work.seq_len
        return flops / (seconds * machine.devices * machine.device.tflops * 1e12)

    def _parts(self, choice: Choice) -> list[_Pass]:
        """What each pipeline rank has to do for a microbatch."""
        layout, size = choice.layout, choice.batching.size
        layer = self._layer(layout.tp, layout.cp, layout.ulysses, layout.ep, size, choice.recompute)
        head, pipeline, parts = self._head(layout, size), layout.pipeline, []
        stages = self._shares.layers(pipeline.stages)
        for rank in range(pipeline.ranks):
            mine = pipeline.stages_of(rank)
            layers, last = sum(stages[stage] for stage in mine), pipeline.stages - 1 in mine
            parts.append(
                _Pass(
                    layers * layer.forward + last * head / 3,
                    layers * layer.backward + last * head * 2 / 3,
                    layers * layer.tensor,
                    layers * layer.context,
                    layers * layer.experts,
                )
            )
        return parts

    def _layer_pass(self, tp: int, cp: int, ulysses: int, ep: int, size: int, recompute: Recompute) -> _Pass:
        work, calibration = self._work, self._calibration
        shape, tokens = work.shape, size * work.seq_len / cp
        products = sum(self._product_s(*product) for product in self._products(tokens, tp))
        # Fused causal attention computes half of the square of scores; backward two and a half times as much.
        attention = 2 * tokens * work.seq_len * shape.attention_size / tp / (self._reached * _ATTENTION)
        kept = layer_bytes_per_token(shape, tp=tp, dtype=work.dtype, recompute="none", compiled=work.compiled)
        elementwise = tokens * kept / (self._machine.device.memory_gbs * 1e9)
        forward = products + attention + elementwise
        again = {"none": 0.0, "selective": elementwise, "full": forward + calibration.layer_s}[recompute]
        backward = 2 * products + 2.5 * attention + 2 * elementwise + 1.5 * calibration.layer_s + again
        shown = 1 - calibration.exchanges_hidden
        return _Pass(
            forward + calibration.layer_s,
            backward,
            shown * self._tensor_s(tokens, tp, again=recompute == "full"),
            shown * self._context_s(size, tp, cp, ulysses),
            shown * self._experts_s(tokens, tp, ep),
        )

    def _products(self, tokens: float, tp: int) -> Iterator[tuple[float, float, float]]:
        """(rows, inputs, outputs) of the matrix products of a layer on a rank; several alike as one with all rows."""
        shape = self._work.shape
        h, ups = shape.hidden_size, shape.feed_forward_matrices - 1
        yield tokens, h, (shape.attention_size + 2 * shape.kv_size) / tp
        yield tokens, shape.attention_size / tp, h
        widths = [(tokens, shape.shared_expert_size if shape.num_experts else shape.ffn_size)]
        if shape.num_experts:
            widths.append((tokens * shape.experts_per_token, shape.ffn_size))
        for rows, width in widths:
            if width:
                yield rows, h, ups * width / tp
                yield rows, width / tp, h

    def _product_s(self, rows: float, inputs: float, outputs: float) -> float:
        narrowest = min(rows, inputs, outputs)
        return 2 * rows * inputs * outputs / (self._reached * narrowest / (narrowest + _NARROW))

    def _head(self, layout: Layout, size: int) -> float:
        """Seconds of the head and the loss, there and back."""
        shape, tokens = self._work.shape, size * self._work.seq_len / layout.cp
        rows = shape.vocab_size / layout.tp
        product = self._product_s(tokens, shape.hidden_size, rows)
        moved = _COMPILED_LOGIT_BYTES if self._work.compiled else _LOGIT_BYTES
        return 3 * product + moved * tokens * rows / (self._machine.device.memory_gbs * 1e9)

    def _tied_s(self, layout: Layout) -> float:
        """A table that is the first stage's and the last one's has its gradients summed over both once a step."""
        shape, pipeline = self._work.shape, layout.pipeline
        if not shape.tie_embeddings or pipeline.stages - 1 in pipeline.stages_of(0):
            return 0.0
        size = shape.vocab_size * shape.hidden_size / layout.tp * self._work.state_width
        return self._machine.collective_s("all_reduce", size, 2, 1 if self._machine.nodes > 1 else 2)

    def _tensor_s(self, tokens: float, tp: int, *, again: bool) -> float:
        """Exchanges of the residual stream, in both passes and where the forward one is done again."""
        sent = comm_volume.of_tensor(self._work, tokens, tp)
        one = self._machine.collective_s("gather", sent, tp, min(tp, self._machine.per_node))
        return comm_volume.TENSOR_EXCHANGES * (3 if again else 2) * one

    def _context_s(self, size: int, tp: int, cp: int, ulysses: int) -> float:
        """Ulysses: two exchanges a pass of queries, keys, values and results. Ring: keys and values once around, and in
        the backward pass their gradients too."""
        tokens, ring = size * self._work.seq_len / cp, cp // ulysses
        a_node, seconds = max(1, self._machine.per_node // tp), 0.0
        if ulysses > 1:
            sent = comm_volume.of_ulysses(self._work, tokens, tp, ulysses)
            seconds += 2 * self._machine.collective_s("gather", sent, ulysses, min(ulysses, a_node))
        if ring > 1:
            sent = comm_volume.of_ring(self._work, tokens, tp)
            seconds += 3 * (ring - 1) * self._machine.transfer_s(sent, across=cp > a_node)
        return seconds

    def _experts_s(self, tokens: float, tp: int, ep: int) -> float:
        """Rows go to their experts and come back, in both passes."""
        sent, a_node = comm_volume.of_experts(self._work, tokens, tp, ep), max(1, min(ep, self._machine.per_node // tp))
        return comm_volume.EXPERT_EXCHANGES * self._machine.collective_s("gather", sent, ep, a_node)

    def _data_parallel(self, choice: Choice, own: RankParameters, part: _Pass) -> float:
        """What gradients and weights of data-parallel ranks take beyond what is hidden."""
        layout = choice.layout
        seconds = self._traffic_s(choice, own.dense, layout.dp_shard, layout.copies, layout.cp * layout.tp)
        if own.experts:
            sizes = layout.expert_sizes if layout.ep > 1 else {"dp_shard": layout.dp_shard, "copies": layout.copies}
            stride = layout.tp * layout.ep
            seconds += self._traffic_s(choice, own.experts, sizes["dp_shard"], sizes["copies"], stride)
        window = part.backward if layout.zero < 2 else choice.turns * part.backward
        if layout.zero == 3:
            window = choice.turns * part.compute
        return seconds - self._calibration.gradients_hidden * min(seconds, window)

    def _traffic_s(self, choice: Choice, parameters: int, shards: int, copies: int, stride: int) -> float:
        """Seconds of a step's collectives for so many parameters of a rank, over its shards and its copies.

        A gradient's bytes are those of the state. ZeRO-1 reduce-scatters gradients and gathers weights once, ZeRO-2
        reduce-scatters in every microbatch, ZeRO-3 also gathers twice in each (Rajbhandari et al. 2020, arXiv
        1910.02054). `stride`: how far apart neighbouring shards stand.
        """
        work, machine, turns, zero = self._work, self._machine, choice.turns, choice.layout.zero
        seconds = 0.0
        if shards > 1:
            a_node = max(1, min(shards, machine.per_node // stride))
            moved = parameters * (shards - 1) / shards
            scatter = machine.collective_s("gather", moved * work.state_width, shards, a_node)
            gather = machine.collective_s("gather", moved * work.width, shards, a_node)
            seconds += scatter * (turns if zero >= 2 else 1) + gather * (2 * turns if zero == 3 else 1)
        if copies > 1:
            apart = stride * shards if shards > 1 else max(1, stride // choice.layout.cp)
            a_node = max(1, min(copies, machine.per_node // apart))
            sent = 2 * parameters / shards * work.state_width * (copies - 1) / copies
            seconds += machine.collective_s("all_reduce", sent, copies, a_node) * (turns if zero >= 2 else 1)
        return seconds

    def _optimizer(self, choice: Choice, own: RankParameters) -> float:
        """Clipping and the step go over a rank's own state once; host memory and disks are slower than a device's."""
        layout = choice.layout
        shards = layout.dp_shard if layout.zero else 1
        expert_shards = layout.expert_sizes["dp_shard"] if layout.ep > 1 else shards
        parameters = own.dense / shards + own.experts / expert_shards
        speed = {"none": self._machine.device.memory_gbs, "cpu": _HOST_GBS, "disk": _DISK_GBS}[choice.offload]
        return parameters * _STATE_TRAFFIC * self._work.state_width / (speed * 1e9)


@lru_cache(maxsize=4096)
def _simulated_gap(schedule: Name, ranks: int, per_rank: int, turns: int) -> float:
    """The gap in passes there and back of a rank, forward being a third of one. Equal ranks."""
    pipeline = Schedule(schedule, ranks, per_rank)
    seconds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}

    def of(action: Action) -> float:
        return seconds[action.kind] / (3 * per_rank)

    spans = simulate(pipeline.orders(turns), of, pipeline.stages)
    return max(span.end for span in spans) - turns


def _gap(layout: Layout, turns: int) -> float:
    """How many of its own passes a pipeline rank waits in a step."""
    if layout.pp == 1:
        return 0.0
    if layout.schedule in ("gpipe", "1f1b"):
        return layout.pp - 1.0
    pipeline = layout.pipeline
    return _simulated_gap(layout.schedule, layout.pp, pipeline.per_rank, pipeline.enough(turns))
