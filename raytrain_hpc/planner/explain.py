"""Explanations of a plan in words: why this layout, where its time goes, and what would make it fit."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.search import Estimate
from raytrain_hpc.planner.workload import Workload

_COST_LABELS = {
    "compute": "arithmetic and memory",
    "tensor": "tensor-parallel communication",
    "context": "context-parallel communication",
    "experts": "expert-parallel communication",
    "pipeline": "sends between stages",
    "bubble": "pipeline bubble",
    "data": "data-parallel communication",
    "optimizer": "optimizer",
}
_TIGHT_SHARE = 0.03  # of the device's memory; the estimate can be off by as much


def is_tight(best: Estimate, machine: Machine) -> bool:
    """Return whether the estimated memory is within 3% of that of a device, either way."""
    return abs(best.memory_gib / machine.device.memory_gib - 1) <= _TIGHT_SHARE


def describe_fit(best: Estimate, machine: Machine) -> str:
    """Describe in a line whether the best layout fits into device memory, and whether that is tight."""
    name, limit = machine.device.name, machine.device.memory_gib
    verdict = ("fits" if best.fits else "does not fit") + (", tight" if is_tight(best, machine) else "")
    smallest = "" if best.fits else "the smallest layout needs "
    return f"{verdict}: {smallest}{best.memory_gib:.1f} of {limit:g} GiB per {name}"


def describe_expectation(estimate: Estimate, workload: Workload, machine: Machine) -> str:
    """Describe in a line the expected step time, throughput, MFU and memory of a run."""
    tokens_per_s = workload.global_batch_size * workload.seq_len / estimate.step_s
    mfu_text = "" if machine.device.name == "cpu" else f", mfu {100 * estimate.mfu:.1f}%"
    return (
        f"{estimate.step_s:.3g} s per step, {tokens_per_s:.3g} tok/s{mfu_text}; {estimate.memory_gib:.2f} of "
        f"{machine.device.memory_gib:g} GiB per {machine.device.name}; {explain_estimate(estimate, estimate, machine)}"
    )


def explain_estimate(estimate: Estimate, best: Estimate, machine: Machine) -> str:
    """Explain why a layout is worse than the best one, or for the best one itself where its time goes."""
    if not estimate.fits:
        return _explain_memory(estimate, machine)
    seconds_by_component = {name: getattr(estimate.cost, name) for name in _COST_LABELS}
    if estimate is best:
        largest = [
            item
            for item in sorted(seconds_by_component.items(), key=lambda item: -item[1])[:3]
            if item[1] > 0.005 * estimate.step_s
        ]
        return ", ".join(f"{100 * seconds / estimate.step_s:.0f}% {_COST_LABELS[name]}" for name, seconds in largest)
    extra_s = {name: seconds - getattr(best.cost, name) for name, seconds in seconds_by_component.items()}
    worst = max(extra_s, key=lambda name: extra_s[name])
    percent = 100 * (estimate.step_s / best.step_s - 1)
    if percent < 0.5:
        return "as fast as the best"
    return (
        f"{percent:.0f}% slower: {_COST_LABELS[worst]}{_describe_link(worst, estimate, machine)} "
        f"+{_format_duration(extra_s[worst])}"
    )


def _explain_memory(estimate: Estimate, machine: Machine) -> str:
    footprint = estimate.footprint
    bytes_by_kind = {
        "weights, gradients and moments": footprint.weights + footprint.gradients + footprint.moments,
        "copies in the compute dtype": footprint.copies,
        "partial sums of gradients, for train.deterministic=elastic": footprint.sums,
        "activations": footprint.activations,
        "logits and recomputation": footprint.working,
    }
    largest = max(bytes_by_kind, key=lambda kind: bytes_by_kind[kind])
    excess_gib = estimate.memory_gib - machine.device.memory_gib
    return f"{excess_gib:.1f} GiB too much: {bytes_by_kind[largest] / 2**30:.1f} GiB of {largest}"


def _describe_link(cost_name: str, estimate: Estimate, machine: Machine) -> str:
    """Describe the link that this cost component uses, empty if it uses none."""
    layout, ranks_per_node = estimate.choice.layout, machine.per_node
    group_sizes = {
        "tensor": layout.tp,
        "context": layout.tp * layout.cp,
        "experts": layout.tp * layout.ep,
        "data": layout.world_size // layout.pp,
        "pipeline": layout.world_size,
    }
    if cost_name not in group_sizes:
        return ""
    return f" over {machine.across.name if group_sizes[cost_name] > ranks_per_node else machine.inside.name}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def describe_estimate(estimate: Estimate, best: Estimate, workload: Workload, machine: Machine) -> dict[str, Any]:
    """Return an estimate as JSON values, with the keys that `plan --json` documents."""
    choice, layout = estimate.choice, estimate.choice.layout
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")
    return {
        **{axis: getattr(layout, axis) for axis in axes},
        "pp_schedule": layout.schedule,
        "pp_stages_per_rank": layout.pipeline.stages_per_rank,
        "micro_batch_size": choice.batching.size,
        "grad_acc": choice.microbatches_per_rank,
        "activation_checkpointing": choice.recompute,
        "recompute_layers": choice.recompute_layers,
        "activation_offload": choice.activation_offload,
        "offload": choice.offload,
        "compile": choice.compiled,
        "step_time_s": estimate.step_s,
        "tokens_per_sec": workload.global_batch_size * workload.seq_len / estimate.step_s,
        "mfu": estimate.mfu,
        "memory_gib": estimate.memory_gib,
        "host_memory_gib": estimate.footprint.host / 2**30,
        "fits": estimate.fits,
        "why": explain_estimate(estimate, best, machine),
        "seconds": {name: getattr(estimate.cost, name) for name in _COST_LABELS},
    }
