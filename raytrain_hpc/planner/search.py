"""Layout search: enumerate all legal layouts for a model, a batch and a machine, and rank them by step time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.cost_model import CostModel, StepCost
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.hardware_defaults import resolve_compile
from raytrain_hpc.planner.layout import (
    Batching,
    Layout,
    check_model_divisible,
    get_largest_dp_size,
    resolve_batching,
    resolve_layout,
)
from raytrain_hpc.planner.memory_model import MemoryFootprint, MemoryModel
from raytrain_hpc.planner.memory_savings import SavingOptions, list_saving_options
from raytrain_hpc.planner.search_space import SearchSpace
from raytrain_hpc.planner.workload import LayoutChoice, Workload, make_choice, make_workload


@dataclass(frozen=True)
class Estimate:
    """The expected cost and memory of a layout choice. `fits`: whether the memory fits the machine's devices."""

    choice: LayoutChoice
    cost: StepCost
    footprint: MemoryFootprint
    memory_gib: float
    fits: bool
    mfu: float

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return self.cost.total


def rank_layouts(
    config: Config, spec: ModelSpec, machine: Machine, calibration: Calibration, space: SearchSpace
) -> list[Estimate]:
    """Return an estimate of every legal layout on all devices of the machine, best first.

    Layouts that fit come first, by step time; the others follow by memory. `space` holds the settings to choose, see
    `build_search_space`; all others are kept. Recomputation and offloading are only as strong as needed for a layout to
    fit. Raises LayoutError if no layout is legal, with the reason against the first one tried.
    """
    config = resolve_compile(config, has_accelerator=machine.device.name != "cpu")
    models, options = _build_models(config, spec, machine, calibration), list_saving_options(config, space)
    estimates, reason = [], None
    for candidate in _iter_configs(config, spec, machine, space):
        try:
            estimates += [
                models.estimate(models.find_cheapest_savings(choice, options))
                for choice in _list_choices(candidate, spec, machine, space)
            ]
        except LayoutError as error:
            reason = reason or error
    if not estimates and reason is None:  # the fixed settings do not fit the devices: raise the reason
        check_model_divisible(config, spec)
        resolve_batching(config, resolve_layout(config, machine.num_devices))
    if not estimates:
        remedy = f"no layout is legal on {machine.num_devices} devices; fix fewer axes or use another number of devices"
        raise reason or LayoutError("parallel", "auto", "", remedy)
    return sorted(
        _remove_equal(estimates),
        key=lambda estimate: (
            not estimate.fits,
            estimate.step_s if estimate.fits else estimate.memory_gib,
            _compute_complexity(estimate),
        ),
    )


def find_lowest_memory(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    space: SearchSpace,
    get_memory_model: Callable[[Workload], MemoryModel],
) -> float | None:
    """Return the GiB of the first legal layout that fits, or the lowest if none does; None if none is legal.

    A faster answer than `rank_layouts` to whether a layout fits: only with the most recomputation and offloading that
    `space` allows, and without step times.
    """
    config, lowest = resolve_compile(config, has_accelerator=machine.device.name != "cpu"), None
    options = list_saving_options(config, space)
    for candidate in _iter_configs(config, spec, machine, space):
        try:
            choices = _list_choices(candidate, spec, machine, space)
        except LayoutError:
            continue
        memory_model = get_memory_model(make_workload(candidate, spec))
        for choice in choices:
            footprint = memory_model.estimate_footprint(options.apply_strongest(choice))
            gib = footprint.compute_required_gib(machine.device)
            lowest = gib if lowest is None else min(lowest, gib)
            if lowest <= machine.device.memory_gib:
                return lowest
    return lowest


def estimate_layout(
    config: Config, spec: ModelSpec, machine: Machine, calibration: Calibration, layout: Layout, batching: Batching
) -> Estimate:
    """Estimate cost and memory of one layout with the given settings."""
    return _build_models(config, spec, machine, calibration).estimate(make_choice(config, layout, batching))


def choose_savings(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    calibration: Calibration,
    layout: Layout,
    batching: Batching,
    space: SearchSpace,
) -> LayoutChoice:
    """Return the cheapest measures in `space` to save memory with which a given layout fits."""
    models = _build_models(config, spec, machine, calibration)
    return models.find_cheapest_savings(make_choice(config, layout, batching), list_saving_options(config, space))


@dataclass(frozen=True)
class _Models:
    machine: Machine
    cost: CostModel
    memory: MemoryModel

    def find_cheapest_savings(self, choice: LayoutChoice, options: SavingOptions) -> LayoutChoice:
        device = self.machine.device

        def fits(candidate: LayoutChoice) -> bool:
            return self.memory.estimate_footprint(candidate).compute_required_gib(device) <= device.memory_gib

        return options.find_cheapest(
            choice,
            self.memory.get_max_stage_layers(choice.layout),
            fits,
            lambda candidate: self.cost.estimate_step(candidate).total,
        )

    def estimate(self, choice: LayoutChoice) -> Estimate:
        device, cost = self.machine.device, self.cost.estimate_step(choice)
        footprint = self.memory.estimate_footprint(choice)
        gib, mfu = footprint.compute_required_gib(device), self.cost.compute_mfu(cost.total)
        return Estimate(choice, cost, footprint, gib, gib <= device.memory_gib, mfu)


def _build_models(config: Config, spec: ModelSpec, machine: Machine, calibration: Calibration) -> _Models:
    workload = make_workload(config, spec)
    return _Models(machine, CostModel(workload, machine, calibration), MemoryModel(workload))


def _remove_equal(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates without those that describe the same run in other words; the simplest is kept.

    ZeRO shards nothing over one rank, and a pipeline of one rank has no schedule.
    """
    unique: dict[LayoutChoice, Estimate] = {}
    for estimate in sorted(estimates, key=_compute_complexity):
        layout = estimate.choice.layout
        if layout.dp_shard == 1:
            layout = replace(layout, zero=0)
        if layout.pp == 1:
            layout = replace(layout, schedule="1f1b", virtual_stages=1)
        unique.setdefault(replace(estimate.choice, layout=layout), estimate)
    return list(unique.values())


def _compute_complexity(estimate: Estimate) -> tuple[int, ...]:
    layout = estimate.choice.layout
    return (
        layout.pp,
        layout.tp,
        layout.cp,
        layout.ep,
        layout.zero,
        layout.dp_replicate,
        -estimate.choice.batching.size,
    )


def _iter_configs(config: Config, spec: ModelSpec, machine: Machine, space: SearchSpace) -> Iterator[Config]:
    """Yield the config for every combination of model-parallel axes, ZeRO stage, schedule and data axes."""
    world_size = machine.num_devices

    def list_sizes(key: str, limit: int, within: int = world_size) -> Sequence[int]:
        fixed = getattr(config.parallel, key)
        if key not in space:
            return [int(fixed)]
        allowed = space[key]
        return allowed if allowed is not None else [n for n in _list_divisors(within) if n <= limit]

    max_cp = max(1, config.train.seq_len // 1024)  # shorter sequence shards are not worth their communication
    for tp in list_sizes("tp", min(spec.num_heads, machine.per_node), machine.per_node):
        for pp in list_sizes("pp", spec.num_layers):
            for cp in list_sizes("cp", max_cp):
                if world_size % (tp * pp * cp):
                    continue
                dp_size = world_size // (tp * pp * cp)
                for ep in list_sizes("ep", spec.num_experts or 1, dp_size * cp):
                    for zero in space["zero"] or (0, 1, 2, 3) if "zero" in space else (config.parallel.zero,):
                        for schedule in _list_schedules(config, pp, space):
                            parallel_settings = {
                                "tp": tp,
                                "pp": pp,
                                "cp": cp,
                                "ep": ep,
                                "zero": zero,
                                "pp_schedule": schedule,
                            }
                            yield from _iter_data_axes(config, machine, parallel_settings, dp_size, space)


def _list_schedules(config: Config, pp: int, space: SearchSpace) -> Sequence[Any]:
    if "pp_schedule" not in space or pp == 1:
        return [config.parallel.pp_schedule]
    return space["pp_schedule"] or ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


def _iter_data_axes(
    config: Config, machine: Machine, parallel_settings: Mapping[str, Any], dp_size: int, space: SearchSpace
) -> Iterator[Config]:
    """Yield configs with the sizes of the data axes: all ranks shard the state.

    Under ZeRO-3, which gathers weights in every pass, also shards within a node with replicas across nodes.
    """
    allowed_shards, allowed_replicas = (_list_allowed(config, key, space) for key in ("dp_shard", "dp_replicate"))
    if space.get("dp_shard") is None and space.get("dp_replicate") is None and (allowed_shards or allowed_replicas):
        yield _override_parallel(config, **parallel_settings)  # fixed by settings, which resolve_layout checks
        return
    if parallel_settings["zero"] == 0:
        shards: Sequence[int] = [1]
    elif allowed_shards is not None:
        shards = allowed_shards
    elif allowed_replicas is not None:
        shards = [dp_size // replicas for replicas in allowed_replicas if dp_size % replicas == 0]
    else:
        shards_per_node = max(1, machine.per_node // (parallel_settings["tp"] * parallel_settings["cp"]))
        shards = sorted(
            {dp_size, shards_per_node}
            if parallel_settings["zero"] == 3 and dp_size % shards_per_node == 0 and shards_per_node > 1
            else {dp_size}
        )
    for shard in shards:
        if (
            dp_size % shard == 0
            and (shard > 1 or dp_size == 1 or parallel_settings["zero"] == 0)
            and (allowed_shards is None or shard in allowed_shards)
            and (allowed_replicas is None or dp_size // shard in allowed_replicas)
        ):
            yield _override_parallel(config, **parallel_settings, dp_shard=shard, dp_replicate=dp_size // shard)


def _list_allowed(config: Config, key: str, space: SearchSpace) -> Sequence[int] | None:
    """Return the sizes of a data axis that the settings allow: a list or one number; None for any."""
    fixed = getattr(config.parallel, key)
    return space[key] if key in space else None if fixed == AUTO else [int(fixed)]


def _override_parallel(config: Config, **parallel_settings: Any) -> Config:
    """Return the config with these parallel settings. Only the parallel section is copied."""
    candidate = copy(config)
    candidate.parallel = replace(config.parallel, **parallel_settings)
    return candidate


def _list_choices(config: Config, spec: ModelSpec, machine: Machine, space: SearchSpace) -> list[LayoutChoice]:
    """Return a choice for every micro-batch size of these settings. Raises LayoutError if they are not legal."""
    layout = resolve_layout(config, machine.num_devices)
    check_model_divisible(config, spec)
    if "micro_batch_size" not in space:
        return [LayoutChoice(layout, resolve_batching(config, layout), compiled=config.train.compile is True)]
    allowed, choices = space["micro_batch_size"], list[LayoutChoice]()
    reason = None
    batch = config.train.global_batch_size  # in whole microbatches: validation demands one size that divides it
    for size in _list_sizes(config, layout) if allowed is None else allowed:
        if size != AUTO and batch % size:
            continue
        sized_config = copy(config)
        sized_config.train = replace(config.train, micro_batch_size=size)
        try:
            batching = resolve_batching(sized_config, layout)
            choices.append(LayoutChoice(layout, batching, compiled=config.train.compile is True))
        except LayoutError as error:
            reason = error
    if not choices and reason is not None:
        raise reason
    return choices


def _list_sizes(config: Config, layout: Layout) -> list[int]:
    """Return the micro-batch sizes that give every rank a microbatch, if possible also after the run has grown."""
    global_batch_size = config.train.global_batch_size
    sizes = _list_divisors(global_batch_size // get_largest_dp_size(config, layout), of=global_batch_size)
    return sizes or _list_divisors(global_batch_size // layout.dp_size, of=global_batch_size)


def _list_divisors(limit: int, of: int | None = None) -> list[int]:
    """Return the divisors of `of`, or of the limit if `of` is not given, up to the limit."""
    return [n for n in range(1, limit + 1) if (of or limit) % n == 0]
