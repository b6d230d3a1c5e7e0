"""A plan as plain data: the best layouts for a model, a batch and a cluster, and estimates for the best one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.comm_volume import compute_bytes_by_axis
from raytrain_hpc.planner.explain import describe_estimate, describe_fit, is_tight
from raytrain_hpc.planner.flops import CAUSAL_CONVENTION, compute_flops_per_token
from raytrain_hpc.planner.goodput import COPY_BYTES_PER_S, estimate_goodput
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.hardware_defaults import check_float8, resolve_dtype
from raytrain_hpc.planner.model_state_memory import compute_state_bytes, count_max_rank_parameters
from raytrain_hpc.planner.placement import Site, describe_placement, place_ranks
from raytrain_hpc.planner.remedies import suggest_remedies
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
    """Return everything that the `plan` command reports, as JSON values. See api.plan for the arguments."""
    has_accelerator = machine.device.name != "cpu"
    config = resolve_dtype(config, has_bf16=has_accelerator)
    check_float8(config, [machine.device.name] if has_accelerator and not machine.device.float8_speedup else [])
    vocab_size = 256 if config.model.vocab_size == "auto" else None
    spec = resolve_model_spec(config.model, vocab_size=vocab_size, seq_len=config.train.seq_len)
    space = build_search_space(config, has_accelerator=has_accelerator)
    estimates, workload = rank_layouts(config, spec, machine, calibration, space), make_workload(config, spec)
    best = estimates[0]
    choice, layout = best.choice, best.choice.layout
    rank_parameters = count_max_rank_parameters(spec, layout, workload.seq_len)
    state_size = compute_state_bytes(rank_parameters, layout, workload, choice.offload)
    expected = estimate_goodput(
        machine.num_devices,
        save_s=state_size / COPY_BYTES_PER_S,
        restart_s=restart_s,
        pause_s=pause_s,
        device_hours=device_hours,
    )
    layouts = [describe_estimate(estimate, best, workload, machine) for estimate in estimates]
    budget = tokens or float(config.train.steps * workload.global_batch_size * workload.seq_len)
    total_s = budget / layouts[0]["tokens_per_sec"] / max(expected.in_memory, 1e-9)
    return {
        "verdict": describe_fit(best, machine),
        "fits": best.fits,
        "tight": is_tight(best, machine),
        "remedies": [] if best.fits else suggest_remedies(config, spec, machine, space),
        "machine": asdict(machine),
        "workers": machine.num_devices,
        "layout": asdict(layout),
        "placement": _describe_placement(workload, choice, machine),
        "microbatches": asdict(choice.batching),
        "microbatches_per_rank": [len(microbatches) for microbatches in choice.batching.split_by_rank(layout.dp_size)],
        "parameters": spec.count_parameters(),
        "state_bytes_per_rank": state_size,
        "memory": {**asdict(best.footprint), "on_device_gib": best.memory_gib},
        "flops_per_token": compute_flops_per_token(spec, workload.seq_len),
        "flops_convention": CAUSAL_CONVENTION,
        "budget": {"tokens": budget, "days": total_s / 86400, "device_hours": total_s / 3600 * machine.num_devices},
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
    """Describe which axes of the chosen layout stay inside nodes."""
    sites = [Site("", f"node {index // machine.per_node}") for index in range(machine.num_devices)]
    placement = place_ranks(choice.layout, sites, compute_bytes_by_axis(workload, choice.layout, choice.batching))
    return describe_placement(choice.layout, [sites[index] for index in placement])
