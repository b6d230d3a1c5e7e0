"""Resolve settings left to the planner for the cluster that the run uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from math import gcd
from typing import Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.validation import validate_config
from raytrain_hpc.device_backends import has_endless_kernel
from raytrain_hpc.driver.backend import ExecutionBackend
from raytrain_hpc.driver.host_machine import fit_to_host
from raytrain_hpc.driver.run_setup import PreparedRun, check_optimizer
from raytrain_hpc.elastic.recovery import get_min_workers
from raytrain_hpc.errors import ConfigError, LayoutError
from raytrain_hpc.planner.explain import describe_fit, explain_estimate
from raytrain_hpc.planner.hardware import Machine, make_machine
from raytrain_hpc.planner.hardware_defaults import check_float8, resolve_compile, resolve_dtype
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.measured_links import load_calibration, load_links
from raytrain_hpc.planner.search import Estimate, choose_savings, estimate_layout, rank_layouts
from raytrain_hpc.planner.search_space import apply_choice, build_search_space
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.planner.workload import LayoutChoice

_ACTIVATION_SETTINGS = {"activation_checkpointing", "recompute_layers", "activation_offload"}
_FALLBACK_DEVICE = "h100"  # assumed for a device whose name is unknown


def resolve_for_backend(
    prepared: PreparedRun, backend: ExecutionBackend, print_line: Callable[[str], None]
) -> PreparedRun:
    """Return the run with every free setting resolved for the workers of `backend`.

    If the run follows the cluster and has too few microbatches for all workers that it has room for, the number of
    workers is lowered to the largest legal one. Raises LayoutError if no layout is legal, as `resolve_auto_layout`.
    """
    wanted = backend.world_size
    if prepared.config.train.dtype == "float8" and not backend.cluster.has_accelerators:
        print_line("train.dtype=float8 is emulated on CPUs: slow, for tests")
    try:
        resolved = resolve_auto_layout(prepared, wanted, backend.cluster, print_line)
        resolved.resolve_layout(wanted)
        return resolved
    except LayoutError:
        if not backend.follows_cluster:
            raise
        smaller_sizes = range(wanted - 1, get_min_workers(prepared.config) - 1, -1)
        for world_size in smaller_sizes:
            with suppress(LayoutError):
                resolved = resolve_auto_layout(prepared, world_size, backend.cluster, print_line)
                _, batching = resolved.resolve_layout(world_size)
                print_line(f"cluster: room for {wanted} workers; {batching.count} microbatches allow {world_size}")
                backend.world_size = world_size
                return resolved
        raise


def list_free_settings(prepared: PreparedRun, cluster: Topology) -> dict[str, Sequence[Any] | None]:
    """Return the settings of the layout that the planner chooses on `cluster`, with the values to choose from."""
    space = build_search_space(
        prepared.config,
        has_accelerator=cluster.has_accelerators,
        data_parallel_only=prepared.custom is not None,
    )
    fixed = {"micro_batch_size"} if prepared.stored_batching is not None else set()  # the batch is split already
    if not cluster.has_accelerators:  # of unknown memory: activations are kept
        fixed |= _ACTIVATION_SETTINGS
    return {name: values for name, values in space.items() if name not in fixed}


def resolve_auto_layout(
    prepared: PreparedRun, world: int, cluster: Topology, print_line: Callable[[str], None]
) -> PreparedRun:
    """Return the run with every free setting resolved for `world` workers on the nodes of `cluster`.

    These are `train.dtype` and `train.compile`, settings of the layout that are `auto` or a list and, on accelerators,
    the parallel axes that are not set. The chosen layout and its expected step time are printed. Raises LayoutError if
    no layout is legal, and ConfigError if other settings do not fit the chosen one or a device lacks float8.
    """
    has_accelerator = cluster.has_accelerators
    config = copy(resolve_dtype(prepared.config, has_bf16=cluster.has_bf16))
    check_float8(config, cluster.without_float8)
    _check_injected_faults(config, cluster)
    free_settings = list_free_settings(replace(prepared, config=config), cluster)
    if prepared.custom is not None:  # train.compile=auto compiles the built-in decoder only
        config = resolve_compile(config, has_accelerator=False)
    if not free_settings:
        return replace(prepared, config=resolve_compile(config, has_accelerator=has_accelerator))
    if prepared.stored_batching is not None:
        config.train = replace(config.train, micro_batch_size=prepared.stored_batching.size)
    machine = build_machine(world, cluster)
    best = rank_layouts(config, prepared.model_spec, machine, load_calibration(machine.device.name), free_settings)[0]
    print_line(f"planned {', '.join(sorted(free_settings))}: {describe_fit(best, machine)}")
    print_line(f"        expected step time {best.step_s:.3g} s: {explain_estimate(best, best, machine)}")
    print_line(f"        {_describe_activation_settings(best.choice)}")
    config = apply_choice(config, best.choice)
    validate_config(config)  # what was chosen may not fit settings that were checked without it
    check_optimizer(config, prepared.custom)
    return replace(prepared, config=config)


def _check_injected_faults(config: Config, cluster: Topology) -> None:
    """Raise ConfigError if `fault.inject` has a fault that workers on the devices of `cluster` cannot have."""
    kinds, origin = [fault.kind for fault in config.fault.inject], config.origin("fault.inject")
    gpu_faults = [kind for kind in kinds if kind.startswith("gpu_")]
    if gpu_faults and not cluster.has_accelerators:
        raise ConfigError("fault.inject", gpu_faults[0], origin, "needs a GPU, and the workers of this run have none")
    if "gpu_hang" in kinds and not has_endless_kernel(cluster.device):
        raise ConfigError("fault.inject", "gpu_hang", origin, f"torch has no endless kernel for {cluster.device}")
    if "network_down" in kinds and cluster.has_accelerators:
        remedy = (
            "needs workers on CPUs: the data of GPUs does not pass the sockets of the process; use cluster.device=cpu"
        )
        raise ConfigError("fault.inject", "network_down", origin, remedy)


def refit_activation_memory(
    prepared: PreparedRun,
    batching: Batching,
    cluster: Topology,
    print_line: Callable[[str], None],
    config: Config,
    layout: Layout,
) -> Config:
    """Return the config of a generation, with recomputation and offload of activations that fit its layout.

    `prepared`: the run with the settings that the user gave; what they fix is kept. `config`: settings that were
    resolved for another layout. Compiled blocks round differently if they are recomputed, so with
    train.deterministic=elastic they stay as they are.
    """
    is_bound = config.train.deterministic == "elastic" and config.train.compile is True
    free_settings = list_free_settings(prepared, cluster)
    space = {name: values for name, values in free_settings.items() if name in _ACTIVATION_SETTINGS}
    if not space or is_bound or prepared.custom is not None:
        return config
    machine = build_machine(layout.world_size, cluster)
    calibration = load_calibration(machine.device.name)
    choice = choose_savings(config, prepared.model_spec, machine, calibration, layout, batching, space)
    fitted = copy(config)
    fitted.parallel = replace(
        config.parallel,
        activation_checkpointing=choice.recompute,
        recompute_layers=choice.recompute_layers,
        activation_offload=choice.activation_offload,
    )
    if fitted.parallel != config.parallel:
        print_line(f"planned for {layout.describe()}: {_describe_activation_settings(choice)}")
    return fitted


def _describe_activation_settings(choice: LayoutChoice) -> str:
    """Format what keeps activations small, as the settings that would give it."""
    recompute = f"parallel.activation_checkpointing={choice.recompute}"
    layers = f" parallel.recompute_layers={choice.recompute_layers}" if choice.recompute_layers else ""
    offload = f" parallel.activation_offload={choice.activation_offload}" if choice.activation_offload != "none" else ""
    return recompute + layers + offload


def estimate_run(prepared: PreparedRun, layout: Layout, batching: Batching, machine: Machine) -> Estimate | None:
    """Estimate step time and memory of a run on `machine`, or return None for a user-supplied module."""
    if prepared.custom is not None:
        return None
    return estimate_layout(
        prepared.config, prepared.model_spec, machine, load_calibration(machine.device.name), layout, batching
    )


def build_machine(world: int, cluster: Topology) -> Machine:
    """Describe `world` workers on `cluster` as a machine whose nodes all have the same number of devices.

    Uneven nodes count as the greatest common divisor of their sizes. A device of unknown name is assumed to be an H100.
    CPU workers on a single node, which is then this one, share its CPUs and its memory.
    """
    workers_per_node = world
    for node in cluster.nodes:
        workers_per_node = gcd(workers_per_node, node.slots) if node.slots < world else workers_per_node
    device_name = cluster.device_name
    machine = make_machine(
        device_name or _FALLBACK_DEVICE, world // workers_per_node, workers_per_node, measured=load_links(device_name)
    )
    if not cluster.has_accelerators and len(cluster.nodes) == 1:
        return fit_to_host(machine)
    if device_name:
        return machine
    name = f"device assumed to be an {_FALLBACK_DEVICE}"
    return replace(machine, device=replace(machine.device, name=name, is_memory_known=False))
