"""Why this layout and not another: what estimates say, in words."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.search import Estimate
from raytrain_hpc.planner.workload import Workload

_COST_LABELS = {
    "compute": "arithmetic and memory",
    "tensor": "tensor-parallel exchanges",
    "context": "context-parallel exchanges",
    "experts": "exchanges of experts",
    "pipeline": "sends between stages",
    "bubble": "the pipeline's bubble",
    "data": "gradients and gathered weights",
    "optimizer": "the optimizer",
}


def describe_fit(best: Estimate, machine: Machine) -> str:
    """Whether anything fits, in a line."""
    name, limit = machine.device.name, machine.device.memory_gib
    if best.fits:
        return f"fits: {best.memory_gib:.1f} of {limit:g} GiB on every {name}"
    return f"does not fit: the leanest layout needs {best.memory_gib:.1f} GiB, a {name} has {limit:g}"


def describe_expectation(estimate: Estimate, workload: Workload, machine: Machine) -> str:
    """What to expect of a run, in a line."""
    rate = workload.global_batch * workload.seq_len / estimate.step_s
    of_peak = "" if machine.device.name == "cpu" else f", mfu {100 * estimate.mfu:.1f}%"
    return (
        f"{estimate.step_s:.3g} s a step, {rate:.3g} tok/s{of_peak}; {estimate.memory_gib:.2f} of "
        f"{machine.device.memory_gib:g} GiB a {machine.device.name}; {explain_estimate(estimate, estimate, machine)}"
    )


def suggest_remedies(best: Estimate, workload: Workload, machine: Machine) -> list[str]:
    """What would make it fit, the cheapest first: at most three, each with the number to change."""
    own, layout = best.footprint, best.choice.layout
    state = own.weights + own.gradients + own.moments
    found = []
    if best.choice.batching.size > 1:
        found.append(f"train.micro_batch=1 instead of {best.choice.batching.size}: activations shrink in proportion")
    if best.choice.recompute != "full":
        found.append("parallel.recompute=full: only a layer's input is kept, a forward pass more is computed")
    if layout.zero < 3 and layout.world_size > 1:
        found.append("parallel.zero=3: weights, gradients and moments are shared out over all data-parallel ranks")
    if best.choice.offload == "none" and own.moments * 4 > own.allocated:
        found.append("parallel.offload=cpu: the optimizer's moments move to host memory")
    if own.activations + own.working > state:
        found.append(f"a shorter train.seq_len than {workload.seq_len}, or more parallel.cp over which it is cut")
    short = best.memory_gib / machine.device.memory_gib
    found.append(
        f"more devices: about {-(-int(machine.num_devices * short * 10) // 10)} instead of {machine.num_devices}"
    )
    return found[:3]


def explain_estimate(estimate: Estimate, best: Estimate, machine: Machine) -> str:
    """What speaks against one compared with the best; of the best itself, where its time goes."""
    if not estimate.fits:
        return _explain_memory(estimate, machine)
    parts = {name: getattr(estimate.cost, name) for name in _COST_LABELS}
    if estimate is best:
        shares = [
            part for part in sorted(parts.items(), key=lambda part: -part[1])[:3] if part[1] > 0.005 * estimate.step_s
        ]
        return ", ".join(f"{100 * seconds / estimate.step_s:.0f}% {_COST_LABELS[name]}" for name, seconds in shares)
    more = {name: seconds - getattr(best.cost, name) for name, seconds in parts.items()}
    worst = max(more, key=lambda name: more[name])
    slower = 100 * (estimate.step_s / best.step_s - 1)
    return f"{slower:.0f}% slower: {_COST_LABELS[worst]}{_describe_link(worst, estimate, machine)} +{_format_duration(more[worst])}"


def _explain_memory(estimate: Estimate, machine: Machine) -> str:
    own = estimate.footprint
    kinds = {
        "weights, gradients and moments": own.weights + own.gradients + own.moments,
        "copies in the compute type": own.copies,
        "activations": own.activations,
        "logits and recomputation": own.working,
    }
    most = max(kinds, key=lambda kind: kinds[kind])
    over = estimate.memory_gib - machine.device.memory_gib
    return f"{over:.1f} GiB too much: {kinds[most] / 2**30:.1f} GiB of {most}"


def _describe_link(cost_name: str, estimate: Estimate, machine: Machine) -> str:
    """Over which link."""
    layout, a_node = estimate.choice.layout, machine.per_node
    spans = {
        "tensor": layout.tp,
        "context": layout.tp * layout.cp,
        "experts": layout.tp * layout.ep,
        "data": layout.world_size // layout.pp,
        "pipeline": layout.world_size,
    }
    if cost_name not in spans:
        return ""
    return f" over {machine.across.name if spans[cost_name] > a_node else machine.inside.name}"


def _format_duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def describe_estimate(estimate: Estimate, best: Estimate, workload: Workload, machine: Machine) -> dict[str, Any]:
    """An estimate as JSON values: the keys that `plan --json` promises, and what they are made of."""
    choice, layout = estimate.choice, estimate.choice.layout
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")
    return {
        **{axis: getattr(layout, axis) for axis in axes},
        "schedule": layout.schedule,
        "virtual_stages": layout.pipeline.stages_per_rank,
        "micro_batch": choice.batching.size,
        "grad_acc": choice.microbatches_per_rank,
        "recompute": choice.recompute,
        "offload": choice.offload,
        "step_time_s": estimate.step_s,
        "tokens_per_sec": workload.global_batch * workload.seq_len / estimate.step_s,
        "mfu": estimate.mfu,
        "memory_gib": estimate.memory_gib,
        "fits": estimate.fits,
        "why": explain_estimate(estimate, best, machine),
        "seconds": {name: getattr(estimate.cost, name) for name in _COST_LABELS},
    }
