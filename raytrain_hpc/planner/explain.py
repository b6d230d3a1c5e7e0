"""Why this layout and not another: what estimates say, in words."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.search import Estimate
from raytrain_hpc.planner.workload import Work

_WHERE = {
    "compute": "arithmetic and memory",
    "tensor": "tensor-parallel exchanges",
    "context": "context-parallel exchanges",
    "experts": "exchanges of experts",
    "pipeline": "sends between stages",
    "bubble": "the pipeline's bubble",
    "data": "gradients and gathered weights",
    "optimizer": "the optimizer",
}


def verdict(best: Estimate, machine: Machine) -> str:
    """Whether anything fits, in a line."""
    name, limit = machine.device.name, machine.device.memory_gib
    if best.fits:
        return f"fits: {best.memory_gib:.1f} of {limit:g} GiB on every {name}"
    return f"does not fit: the leanest layout needs {best.memory_gib:.1f} GiB, a {name} has {limit:g}"


def expectation(one: Estimate, work: Work, machine: Machine) -> str:
    """What to expect of a run, in a line."""
    rate = work.global_batch * work.seq_len / one.step_s
    of_peak = "" if machine.device.name == "cpu" else f", mfu {100 * one.mfu:.1f}%"
    return (
        f"{one.step_s:.3g} s a step, {rate:.3g} tok/s{of_peak}; {one.memory_gib:.2f} of "
        f"{machine.device.memory_gib:g} GiB a {machine.device.name}; {why(one, one, machine)}"
    )


def remedies(best: Estimate, work: Work, machine: Machine) -> list[str]:
    """What would make it fit, the cheapest first: at most three, each with the number to change."""
    own, layout = best.footprint, best.choice.layout
    state = own.weights + own.gradients + own.moments
    found = []
    if best.choice.batching.size > 1:
        found.append(f"train.micro_batch=1 instead of {best.choice.batching.size}: activations shrink in proportion")
    if best.choice.recompute != "full":
        found.append("parallel.recompute=full: only a layer's input is kept, a forward pass more is computed")
    if layout.zero < 3 and layout.world > 1:
        found.append("parallel.zero=3: weights, gradients and moments are shared out over all data-parallel ranks")
    if best.choice.offload == "none" and own.moments * 4 > own.allocated:
        found.append("parallel.offload=cpu: the optimizer's moments move to host memory")
    if own.activations + own.working > state:
        found.append(f"a shorter train.seq_len than {work.seq_len}, or more parallel.cp over which it is cut")
    short = best.memory_gib / machine.device.memory_gib
    found.append(f"more devices: about {-(-int(machine.devices * short * 10) // 10)} instead of {machine.devices}")
    return found[:3]


def why(one: Estimate, best: Estimate, machine: Machine) -> str:
    """What speaks against one compared with the best; of the best itself, where its time goes."""
    if not one.fits:
        return _most_memory(one, machine)
    parts = {name: getattr(one.cost, name) for name in _WHERE}
    if one is best:
        shares = [part for part in sorted(parts.items(), key=lambda part: -part[1])[:3] if part[1] > 0.005 * one.step_s]
        return ", ".join(f"{100 * seconds / one.step_s:.0f}% {_WHERE[name]}" for name, seconds in shares)
    more = {name: seconds - getattr(best.cost, name) for name, seconds in parts.items()}
    worst = max(more, key=lambda name: more[name])
    slower = 100 * (one.step_s / best.step_s - 1)
    return f"{slower:.0f}% slower: {_WHERE[worst]}{_carried(worst, one, machine)} +{_duration(more[worst])}"


def _most_memory(one: Estimate, machine: Machine) -> str:
    own = one.footprint
    kinds = {
        "weights, gradients and moments": own.weights + own.gradients + own.moments,
        "copies in the compute type": own.copies,
        "activations": own.activations,
        "logits and recomputation": own.working,
    }
    most = max(kinds, key=lambda kind: kinds[kind])
    over = one.memory_gib - machine.device.memory_gib
    return f"{over:.1f} GiB too much: {kinds[most] / 2**30:.1f} GiB of {most}"


def _carried(what: str, one: Estimate, machine: Machine) -> str:
    """Over which link."""
    layout, a_node = one.choice.layout, machine.per_node
    spans = {
        "tensor": layout.tp,
        "context": layout.tp * layout.cp,
        "experts": layout.tp * layout.ep,
        "data": layout.world // layout.pp,
        "pipeline": layout.world,
    }
    if what not in spans:
        return ""
    return f" over {machine.across.name if spans[what] > a_node else machine.inside.name}"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def described(one: Estimate, best: Estimate, work: Work, machine: Machine) -> dict[str, Any]:
    """An estimate as JSON values: the keys that `plan --json` promises, and what they are made of."""
    choice, layout = one.choice, one.choice.layout
    axes = ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")
    return {
        **{axis: getattr(layout, axis) for axis in axes},
        "schedule": layout.schedule,
        "virtual_stages": layout.pipeline.per_rank,
        "micro_batch": choice.batching.size,
        "grad_acc": choice.turns,
        "recompute": choice.recompute,
        "offload": choice.offload,
        "step_time_s": one.step_s,
        "tokens_per_sec": work.global_batch * work.seq_len / one.step_s,
        "mfu": one.mfu,
        "memory_gib": one.memory_gib,
        "fits": one.fits,
        "why": why(one, best, machine),
        "seconds": {name: getattr(one.cost, name) for name in _WHERE},
    }
