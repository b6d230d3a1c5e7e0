"""A plan: the best layouts for a model, a batch and a cluster, and what to expect of the best, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from raytrain_hpc.config.model_spec import resolve_shape
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.comm_volume import by_axis
from raytrain_hpc.planner.explain import described, remedies, verdict
from raytrain_hpc.planner.flops import CAUSAL_CONVENTION, flops_per_token
from raytrain_hpc.planner.goodput import COPY_BYTES_PER_S, goodput
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.model_state_memory import parameters_of_rank, state_bytes
from raytrain_hpc.planner.placement import Site, arranged
from raytrain_hpc.planner.placement import described as where
from raytrain_hpc.planner.search import rank
from raytrain_hpc.planner.search_space import free_keys
from raytrain_hpc.planner.workload import Choice, Work, work_of


def make_plan(
    config: Config,
    machine: Machine,
    calibration: Calibration,
    *,
    tokens: float | None,
    device_hours: float,
    restart_s: float,
    pause_s: float,
) -> dict[str, Any]:
    """Everything `plan` says, as JSON values; see api.plan."""
    vocabulary = 256 if config.model.vocab_size == "auto" else None
    shape = resolve_shape(config.model, vocab_size=vocabulary, seq_len=config.train.seq_len)
    free = free_keys(config, accelerated=machine.device.name != "cpu")
    estimates, work = rank(config, shape, machine, calibration, free), work_of(config, shape)
    best = estimates[0]
    choice, layout = best.choice, best.choice.layout
    own = parameters_of_rank(shape, layout, work.seq_len)
    state = state_bytes(own, layout, work.dtype, work.optimizer, choice.offload)
    expected = goodput(
        machine.devices,
        save_s=state / COPY_BYTES_PER_S,
        restart_s=restart_s,
        pause_s=pause_s,
        device_hours=device_hours,
    )
    layouts = [described(one, best, work, machine) for one in estimates]
    budget = tokens or float(config.train.steps * work.global_batch * work.seq_len)
    seconds = budget / layouts[0]["tokens_per_sec"] / max(expected.in_memory, 1e-9)
    return {
        "verdict": verdict(best, machine),
        "fits": best.fits,
        "remedies": [] if best.fits else remedies(best, work, machine),
        "machine": asdict(machine),
        "workers": machine.devices,
        "layout": asdict(layout),
        "placement": _placement(work, choice, machine),
        "microbatches": asdict(choice.batching),
        "microbatches_per_rank": [len(share) for share in choice.batching.shares(layout.data_parallel)],
        "parameters": shape.num_parameters(),
        "state_bytes_per_rank": state,
        "memory": {**asdict(best.footprint), "on_device_gib": best.memory_gib},
        "flops_per_token": flops_per_token(shape, work.seq_len),
        "flops_convention": CAUSAL_CONVENTION,
        "budget": {"tokens": budget, "days": seconds / 86400, "device_hours": seconds / 3600 * machine.devices},
        "failures": {
            "device_hours": device_hours,
            "restart_s": restart_s,
            "pause_s": pause_s,
            **asdict(expected),
        },
        "calibration": asdict(calibration),
        "best": layouts[0],
        "layouts": layouts,
    }


def _placement(work: Work, choice: Choice, machine: Machine) -> str:
    """Which axes stay inside nodes, in a phrase."""
    sites = [Site("", f"node {number // machine.per_node}") for number in range(machine.devices)]
    places = arranged(choice.layout, sites, by_axis(work, choice.layout, choice.batching))
    return where(choice.layout, [sites[place] for place in places])
