"""Activations of a pipeline rank: bytes on the device and in host memory when its memory peaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from raytrain_hpc.planner.activation_memory import (
    Recompute,
    compute_deferred_bytes_per_token,
    compute_layer_bytes_per_token,
    compute_offloaded_bytes,
)
from raytrain_hpc.planner.pipeline_schedule import PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import StageLoad, list_peak_loads
from raytrain_hpc.planner.stage_cache import StageCache
from raytrain_hpc.planner.workload import LayoutChoice, Workload


@dataclass(frozen=True)
class RankActivations:
    """Bytes of activations of a rank.

    `held`: on the device, of all microbatches in flight. `working`: in the backward pass of a layer, while these are
    held. `newest`: of the newest layer, which is not offloaded while the head computes. `last`, `last_working`: the
    same in the last backward pass of a layer, when those of all other layers are free. `host`: in host memory.
    `recomputed_share`: of the rank's layers.
    """

    held: float
    working: float
    newest: float
    last: float
    last_working: float
    host: float
    recomputed_share: float


@dataclass(frozen=True)
class _LayerBytes:
    """Bytes that layers keep from the forward pass for the backward pass, by place."""

    device: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.device + self.host

    def __add__(self, other: _LayerBytes) -> _LayerBytes:
        return _LayerBytes(self.device + other.device, self.host + other.host)

    def scale(self, factor: float) -> _LayerBytes:
        return _LayerBytes(factor * self.device, factor * self.host)


@dataclass(frozen=True)
class _Stage:
    """A stage of a rank: its layers, those of them that are recomputed, and what they keep of a microbatch."""

    layers: int
    num_recomputed: int
    kept: _LayerBytes


class ActivationModel:
    """Estimator of the activations of a workload. Caches results for a layout search."""

    def __init__(self, workload: Workload, stages: StageCache):
        self._workload, self._stage_cache = workload, stages
        self._get_layer_bytes = cache(self._compute_layer_bytes)

    def estimate(self, choice: LayoutChoice, rank: int, own_stages: Sequence[int]) -> RankActivations:
        """Estimate the activations of a pipeline rank that has these stages."""
        workload, tp = self._workload, choice.layout.tp
        tokens, hidden_size = choice.batching.size * workload.seq_len / choice.layout.cp, workload.spec.hidden_size
        offloads, residual_itemsize = choice.activation_offload != "none", workload.get_residual_itemsize(choice.layout)
        kept, recomputed = (
            self._get_layer_bytes(tp, policy, offloads, residual_itemsize).scale(tokens)
            for policy in ("none", choice.recompute)
        )
        boundary = _LayerBytes(2 * tokens * hidden_size / tp * residual_itemsize if choice.layout.pp > 1 else 0.0)
        layer_counts = self._stage_cache.get_layer_counts(choice.layout.pipeline.num_stages)
        stages = {}
        for stage in own_stages:
            layers, count = layer_counts[stage], choice.count_recomputed_layers(layer_counts[stage])
            bytes_kept = recomputed.scale(count) + kept.scale(layers - count) + boundary
            stages[stage] = _Stage(layers, count, bytes_kept)
        num_layers = sum(stage.layers for stage in stages.values())
        num_recomputed = sum(stage.num_recomputed for stage in stages.values())
        newest, last = (recomputed if num_recomputed == num_layers else kept), (recomputed if num_recomputed else kept)
        # Backward pass of a layer: gradients of its two widest tensors, and a few others.
        grad_bytes = tokens * (2 * workload.spec.active_ffn_size + 4 * hidden_size) / tp * workload.compute_itemsize
        # Offloaded activations are on the device for the layer in use and the next one.
        prefetched = max(stage.layers for stage in stages.values()) > 1
        last_working = grad_bytes + last.host + (kept.total - recomputed.total if num_recomputed else 0.0)
        working = grad_bytes + newest.host + (newest if num_layers - num_recomputed > 1 else last).host * prefetched
        if num_recomputed:  # layers that keep all their activations come first, and have made room
            freed = min((stage.layers - stage.num_recomputed) * kept.device for stage in stages.values())
            working = max(working, last_working + last.host * prefetched - freed)
        held, host = self._estimate_held_bytes(choice, rank, stages, newest, tokens, boundary)
        return RankActivations(
            held=held,
            working=working,
            newest=newest.host,
            last=last.device + boundary.device,
            last_working=last_working,
            host=host,
            recomputed_share=num_recomputed / num_layers,
        )

    def _estimate_held_bytes(
        self,
        choice: LayoutChoice,
        rank: int,
        stages: Mapping[int, _Stage],
        newest: _LayerBytes,
        tokens: float,
        boundary: _LayerBytes,
    ) -> tuple[float, float]:
        """Estimate what the microbatches in flight hold on the device and in host memory."""
        workload, tp, num_in_use = self._workload, choice.layout.tp, 1 if choice.activation_offload == "none" else 2
        layer_bytes = tokens * compute_deferred_bytes_per_token(workload.spec, tp=tp, dtype=workload.dtype)
        device_bytes = host_bytes = 0.0
        for load in _list_peak_loads(choice.layout.pipeline, choice.microbatches_per_rank)[rank]:
            held = sum((stage.kept.scale(load[number].in_flight) for number, stage in stages.items()), _LayerBytes(0.0))
            # Between split backward passes, what weight gradients need is recomputed or copied back. The working memory
            # counts it for the layers in use.
            deferred = sum(
                load[number].deferred * max(0.0, stage.layers * layer_bytes + boundary.device - stage.kept.device)
                for number, stage in stages.items()
            )
            deferred = max(0.0, deferred - num_in_use * layer_bytes)
            # The newest layer is not offloaded. In a pipeline it can be of another microbatch than the one in use.
            has_others = sum(load[number].in_flight for number in stages) > 1
            device_bytes = max(device_bytes, held.device + deferred + newest.host * has_others)
            host_bytes = max(host_bytes, held.host)
        return device_bytes, host_bytes

    def _compute_layer_bytes(
        self, tp: int, recompute: Recompute, offloads: bool, residual_itemsize: int
    ) -> _LayerBytes:
        workload = self._workload
        total = compute_layer_bytes_per_token(
            workload.spec,
            tp=tp,
            dtype=workload.dtype,
            recompute=recompute,
            compiled=workload.compiled,
            residual_itemsize=residual_itemsize,
        )
        if not offloads:
            return _LayerBytes(total)
        input_bytes = residual_itemsize * workload.spec.hidden_size / tp
        host = compute_offloaded_bytes(total, input_bytes, recompute=recompute, compiled=workload.compiled)
        return _LayerBytes(total - host, host)


@lru_cache(maxsize=4096)
def _list_peak_loads(pipeline: PipelineSchedule, microbatches: int) -> list[list[dict[int, StageLoad]]]:
    """Return the peak loads of each pipeline rank."""
    if pipeline.name in ("gpipe", "1f1b"):
        count = pipeline.num_ranks
        limits = [microbatches if pipeline.name == "gpipe" else count - rank for rank in range(count)]
        return [[{rank: StageLoad(min(microbatches, limit), 0)}] for rank, limit in enumerate(limits)]
    orders = pipeline.build_orders(pipeline.get_representative_microbatches(microbatches))
    return [list_peak_loads(order) for order in orders]
