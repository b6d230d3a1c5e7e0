"""Which layout? All legal ones for a model, a batch and a machine, with what each costs and needs, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.activation_memory import Recompute
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.cost_model import CostModel, StepCost
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Batching, Layout, check_model_divisible, resolve_batching, resolve_layout
from raytrain_hpc.planner.memory_model import MemoryFootprint, MemoryModel
from raytrain_hpc.planner.search_space import SearchSpace
from raytrain_hpc.planner.workload import LayoutChoice, Offload, make_workload

_RECOMPUTE_ORDER: tuple[Recompute, ...] = ("none", "selective", "full")  # in the order in which they are tried
_OFFLOAD_ORDER: tuple[Offload, ...] = ("none", "cpu")


@dataclass(frozen=True)
class Estimate:
    """One way to train, and what is expected of it. `fits`: on the machine's devices."""

    choice: LayoutChoice
    cost: StepCost
    footprint: MemoryFootprint
    memory_gib: float
    fits: bool
    mfu: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.cost.total


def rank_layouts(
    config: Config, shape: ModelSpec, machine: Machine, calibration: Calibration, space: SearchSpace
) -> list[Estimate]:
    """All legal ways to train on all devices of the machine, those that fit first and each kind by its step time.

    `free`: the settings that are to be chosen, see plan.freedom; all others are kept. Of recompute and offload the
    least is taken with which a layout fits. Raises LayoutError where no legal layout exists, with the reason against
    the last one tried.
    """
    work = make_workload(config, shape)
    models = _Models(machine, CostModel(work, machine, calibration), MemoryModel(work))
    found, reason = [], None
    for settings in _iter_configs(config, shape, machine, space):
        try:
            found += [
                _estimate_with_least_savings(choice, models, config, space)
                for choice in _list_choices(settings, shape, machine, space)
            ]
        except LayoutError as error:
            reason = error
    if not found and reason is None:  # what is fixed does not divide the devices, which this says
        check_model_divisible(config, shape)
        resolve_batching(config, resolve_layout(config, machine.num_devices))
    if not found:
        remedy = f"no layout is legal on {machine.num_devices} devices; fix fewer axes, or use another number of them"
        raise reason or LayoutError("parallel", "auto", "", remedy)
    return sorted(
        found, key=lambda one: (not one.fits, one.step_s if one.fits else one.memory_gib, _compute_complexity(one))
    )


def estimate_layout(
    config: Config, shape: ModelSpec, machine: Machine, calibration: Calibration, layout: Layout, batching: Batching
) -> Estimate:
    """What is expected of these settings on one layout, settled as it is."""
    work = make_workload(config, shape)
    models = _Models(machine, CostModel(work, machine, calibration), MemoryModel(work))
    choice = LayoutChoice(layout, batching, config.parallel.recompute, config.parallel.offload)
    return models.estimate(choice, models.memory.estimate_footprint(choice))


@dataclass(frozen=True)
class _Models:
    machine: Machine
    cost: CostModel
    memory: MemoryModel

    def estimate(self, choice: LayoutChoice, footprint: MemoryFootprint) -> Estimate:
        device, cost = self.machine.device, self.cost.estimate_step(choice)
        gib, mfu = footprint.compute_required_gib(device), self.cost.compute_mfu(cost.total)
        return Estimate(choice, cost, footprint, gib, gib <= device.memory_gib, mfu)


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


def _estimate_with_least_savings(choice: LayoutChoice, models: _Models, config: Config, space: SearchSpace) -> Estimate:
    """The estimate with as little recomputed and offloaded as makes it fit, or with most where nothing does."""
    tried, device = choice, models.machine.device
    for offload in _list_options("offload", config.parallel.offload, _OFFLOAD_ORDER, space):
        for recompute in _list_options("recompute", config.parallel.recompute, _RECOMPUTE_ORDER, space):
            tried = replace(choice, recompute=recompute, offload=offload)
            needed = models.memory.estimate_footprint(tried)
            if needed.compute_required_gib(device) <= device.memory_gib:
                return models.estimate(tried, needed)
    return models.estimate(tried, needed)


def _list_options(key: str, fixed: Any, order: Sequence[Any], space: SearchSpace) -> list[Any]:
    if key not in space:
        return [fixed]
    among = space[key]
    return list(order) if among is None else [one for one in order if one in among]


def _iter_configs(config: Config, shape: ModelSpec, machine: Machine, space: SearchSpace) -> Iterator[Config]:
    """The config once for every combination of the axes that cut a model, the ZeRO stage and the schedule."""
    world = machine.num_devices

    def sizes(key: str, limit: int, within: int = world) -> Sequence[int]:
        fixed = getattr(config.parallel, key)
        if key not in space:
            return [int(fixed)]
        among = space[key]
        return among if among is not None else [n for n in _list_divisors(within) if n <= limit]

    longest = max(1, config.train.seq_len // 1024)  # a shorter share of a sequence is not worth its exchanges
    for tp in sizes("tp", min(shape.num_heads, machine.per_node), machine.per_node):
        for pp in sizes("pp", shape.num_layers):
            for cp in sizes("cp", longest):
                if world % (tp * pp * cp):
                    continue
                data = world // (tp * pp * cp)
                for ep in sizes("ep", shape.num_experts or 1, data * cp):
                    for zero in space["zero"] or (0, 1, 2, 3) if "zero" in space else (config.parallel.zero,):
                        for schedule in _list_schedules(config, pp, space):
                            parts = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "schedule": schedule}
                            yield from _iter_data_axes(config, machine, parts, data, space)


def _list_schedules(config: Config, pp: int, space: SearchSpace) -> Sequence[Any]:
    if "schedule" not in space or pp == 1:
        return [config.parallel.schedule]
    return space["schedule"] or ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


def _iter_data_axes(
    config: Config, machine: Machine, parallel: Mapping[str, Any], dp_size: int, space: SearchSpace
) -> Iterator[Config]:
    """Replicas and shards: all shards; under ZeRO-3, which gathers all the time, also those of a node with replicas."""
    if parallel["zero"] == 0:
        copies = space.get("dp_replicate")
        if copies is None or dp_size in copies:
            yield _override_parallel(config, **parallel, **({} if copies is None else {"dp_replicate": dp_size}))
        return
    if space.get("dp_shard") is not None:
        shards: Sequence[int] = space["dp_shard"] or []
    elif space.get("dp_replicate") is not None:
        shards = [dp_size // copies for copies in space["dp_replicate"] or [] if dp_size % copies == 0]
    elif config.parallel.dp_shard != AUTO or config.parallel.dp_replicate != AUTO:
        yield _override_parallel(config, **parallel)
        return
    else:
        near = max(1, machine.per_node // (parallel["tp"] * parallel["cp"]))
        shards = sorted({dp_size, near} if parallel["zero"] == 3 and dp_size % near == 0 and near > 1 else {dp_size})
    wanted = space.get("dp_replicate")
    for shard in shards:
        if dp_size % shard == 0 and (shard > 1 or dp_size == 1) and (wanted is None or dp_size // shard in wanted):
            yield _override_parallel(config, **parallel, dp_shard=shard, dp_replicate=dp_size // shard)


def _override_parallel(config: Config, **parallel: Any) -> Config:
    """The same settings but for these; only the section that they are in is copied."""
    other = copy(config)
    other.parallel = replace(config.parallel, **parallel)
    return other


def _list_choices(config: Config, shape: ModelSpec, machine: Machine, space: SearchSpace) -> list[LayoutChoice]:
    """Every cut of the batch under these settings. Raises LayoutError where they are not legal."""
    layout = resolve_layout(config, machine.num_devices)
    check_model_divisible(config, shape)
    if "micro_batch" not in space:
        return [LayoutChoice(layout, resolve_batching(config, layout))]
    among, batch, found = space["micro_batch"], config.train.global_batch, []
    reason = None
    for size in _list_divisors(batch // layout.dp_size, of=batch) if among is None else among:
        cut = copy(config)
        cut.train = replace(config.train, micro_batch=size)
        try:
            found.append(LayoutChoice(layout, resolve_batching(cut, layout)))
        except LayoutError as error:
            reason = error
    if not found and reason is not None:
        raise reason
    return found


def _list_divisors(limit: int, of: int | None = None) -> list[int]:
    """Divisors of a number up to a limit, which is the number where none is given."""
    return [n for n in range(1, limit + 1) if (of or limit) % n == 0]
