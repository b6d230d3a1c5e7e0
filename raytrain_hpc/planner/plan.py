"""A plan: the best layouts for a model, a batch and a cluster, and what to expect of the best, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.comm_volume import compute_bytes_by_axis
from raytrain_hpc.planner.explain import describe_estimate, describe_fit, suggest_remedies
from raytrain_hpc.planner.flops import CAUSAL_CONVENTION, compute_flops_per_token
from raytrain_hpc.planner.goodput import COPY_BYTES_PER_S, estimate_goodput
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.model_state_memory import compute_state_bytes, count_max_rank_parameters
from raytrain_hpc.planner.placement import Site, place_ranks
from raytrain_hpc.planner.placement import describe_placement as where
from raytrain_hpc.planner.search import rank_layouts
from raytrain_hpc.planner.search_space import build_search_space
from raytrain_hpc.planner.workload import LayoutChoice, Workload, make_workload


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
    shape = resolve_model_spec(config.model, vocab_size=vocabulary, seq_len=config.train.seq_len)
    free = build_search_space(config, has_accelerator=machine.device.name != "cpu")
    estimates, work = rank_layouts(config, shape, machine, calibration, free), make_workload(config, shape)
    best = estimates[0]
    choice, layout = best.choice, best.choice.layout
    own = count_max_rank_parameters(shape, layout, work.seq_len)
    state = compute_state_bytes(own, layout, work.dtype, work.optimizer, choice.offload)
    expected = estimate_goodput(
        machine.num_devices,
        save_s=state / COPY_BYTES_PER_S,
        restart_s=restart_s,
        pause_s=pause_s,
        device_hours=device_hours,
    )
    layouts = [describe_estimate(one, best, work, machine) for one in estimates]
    budget = tokens or float(config.train.steps * work.global_batch * work.seq_len)
    seconds = budget / layouts[0]["tokens_per_sec"] / max(expected.in_memory, 1e-9)
    return {
        "verdict": describe_fit(best, machine),
        "fits": best.fits,
        "remedies": [] if best.fits else suggest_remedies(best, work, machine),
        "machine": asdict(machine),
        "workers": machine.num_devices,
        "layout": asdict(layout),
        "placement": _describe_placement(work, choice, machine),
        "microbatches": asdict(choice.batching),
        "microbatches_per_rank": [len(share) for share in choice.batching.split_by_rank(layout.dp_size)],
        "parameters": shape.num_parameters(),
        "state_bytes_per_rank": state,
        "memory": {**asdict(best.footprint), "on_device_gib": best.memory_gib},
        "flops_per_token": compute_flops_per_token(shape, work.seq_len),
        "flops_convention": CAUSAL_CONVENTION,
        "budget": {"tokens": budget, "days": seconds / 86400, "device_hours": seconds / 3600 * machine.num_devices},
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


def _describe_placement(workload: Workload, choice: LayoutChoice, machine: Machine) -> str:
    """Which axes stay inside nodes, in a phrase."""
    sites = [Site("", f"node {number // machine.per_node}") for number in range(machine.num_devices)]
    places = place_ranks(choice.layout, sites, compute_bytes_by_axis(workload, choice.layout, choice.batching))
    return where(choice.layout, [sites[place] for place in places])
