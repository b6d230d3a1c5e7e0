"""Which layout? All legal ones for a model, a batch and a machine, with what each costs and needs, best first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.activation_memory import Recompute
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.cost_model import Cost, CostModel
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Batching, Layout, check_shape, resolve_batching, resolve_layout
from raytrain_hpc.planner.memory_model import Footprint, MemoryModel
from raytrain_hpc.planner.search_space import Free
from raytrain_hpc.planner.workload import Choice, Offload, work_of

_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # in the order in which they are tried
_OFFLOAD: tuple[Offload, ...] = ("none", "cpu")


@dataclass(frozen=True)
class Estimate:
    """One way to train, and what is expected of it. `fits`: on the machine's devices."""

    choice: Choice
    cost: Cost
    footprint: Footprint
    memory_gib: float
    fits: bool
    mfu: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.cost.total


def rank(config: Config, shape: ModelShape, machine: Machine, calibration: Calibration, free: Free) -> list[Estimate]:
    """All legal ways to train on all devices of the machine, those that fit first and each kind by its step time.

    `free`: the settings that are to be chosen, see plan.freedom; all others are kept. Of recompute and offload the
    least is taken with which a layout fits. Raises LayoutError where no legal layout exists, with the reason against
    the last one tried.
    """
    work = work_of(config, shape)
    models = _Models(machine, CostModel(work, machine, calibration), MemoryModel(work))
    found, reason = [], None
    for settings in _settings(config, shape, machine, free):
        try:
            found += [_least(choice, models, config, free) for choice in _choices(settings, shape, machine, free)]
        except LayoutError as error:
            reason = error
    if not found and reason is None:  # what is fixed does not divide the devices, which this says
        check_shape(config, shape)
        resolve_batching(config, resolve_layout(config, machine.devices))
    if not found:
        remedy = f"no layout is legal on {machine.devices} devices; fix fewer axes, or use another number of them"
        raise reason or LayoutError("parallel", "auto", "", remedy)
    return sorted(found, key=lambda one: (not one.fits, one.step_s if one.fits else one.memory_gib, _simplicity(one)))


def estimate(
    config: Config, shape: ModelShape, machine: Machine, calibration: Calibration, layout: Layout, batching: Batching
) -> Estimate:
    """What is expected of these settings on one layout, settled as it is."""
    work = work_of(config, shape)
    models = _Models(machine, CostModel(work, machine, calibration), MemoryModel(work))
    choice = Choice(layout, batching, config.parallel.recompute, config.parallel.offload)
    return models.estimate(choice, models.memory.footprint(choice))


@dataclass(frozen=True)
class _Models:
    machine: Machine
    cost: CostModel
    memory: MemoryModel

    def estimate(self, choice: Choice, needed: Footprint) -> Estimate:
        device, cost = self.machine.device, self.cost.step(choice)
        gib, mfu = needed.gib_on(device), self.cost.utilisation(cost.total)
        return Estimate(choice, cost, needed, gib, gib <= device.memory_gib, mfu)


def _simplicity(one: Estimate) -> tuple[int, ...]:
    layout = one.choice.layout
    return (layout.pp, layout.tp, layout.cp, layout.ep, layout.zero, layout.dp_replicate, -one.choice.batching.size)


def _least(choice: Choice, models: _Models, config: Config, free: Free) -> Estimate:
    """The estimate with as little recomputed and offloaded as makes it fit, or with most where nothing does."""
    tried, device = choice, models.machine.device
    for offload in _wished("offload", config.parallel.offload, _OFFLOAD, free):
        for recompute in _wished("recompute", config.parallel.recompute, _RECOMPUTE, free):
            tried = replace(choice, recompute=recompute, offload=offload)
            needed = models.memory.footprint(tried)
            if needed.gib_on(device) <= device.memory_gib:
                return models.estimate(tried, needed)
    return models.estimate(tried, needed)


def _wished(key: str, fixed: Any, order: Sequence[Any], free: Free) -> list[Any]:
    if key not in free:
        return [fixed]
    among = free[key]
    return list(order) if among is None else [one for one in order if one in among]


def _settings(config: Config, shape: ModelShape, machine: Machine, free: Free) -> Iterator[Config]:
    """The config once for every combination of the axes that cut a model, the ZeRO stage and the schedule."""
    world = machine.devices

    def sizes(key: str, limit: int, within: int = world) -> Sequence[int]:
        fixed = getattr(config.parallel, key)
        if key not in free:
            return [int(fixed)]
        among = free[key]
        return among if among is not None else [n for n in _divisors(within) if n <= limit]

    longest = max(1, config.train.seq_len // 1024)  # a shorter share of a sequence is not worth its exchanges
    for tp in sizes("tp", min(shape.num_heads, machine.per_node), machine.per_node):
        for pp in sizes("pp", shape.num_layers):
            for cp in sizes("cp", longest):
                if world % (tp * pp * cp):
                    continue
                data = world // (tp * pp * cp)
                for ep in sizes("ep", shape.num_experts or 1, data * cp):
                    for zero in free["zero"] or (0, 1, 2, 3) if "zero" in free else (config.parallel.zero,):
                        for schedule in _schedules(config, pp, free):
                            parts = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "schedule": schedule}
                            yield from _data_axes(config, machine, parts, data, free)


def _schedules(config: Config, pp: int, free: Free) -> Sequence[Any]:
    if "schedule" not in free or pp == 1:
        return [config.parallel.schedule]
    return free["schedule"] or ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


def _data_axes(config: Config, machine: Machine, parts: Mapping[str, Any], data: int, free: Free) -> Iterator[Config]:
    """Replicas and shards: all shards; under ZeRO-3, which gathers all the time, also those of a node with replicas."""
    if parts["zero"] == 0:
        copies = free.get("dp_replicate")
        if copies is None or data in copies:
            yield _with(config, **parts, **({} if copies is None else {"dp_replicate": data}))
        return
    if free.get("dp_shard") is not None:
        shards: Sequence[int] = free["dp_shard"] or []
    elif free.get("dp_replicate") is not None:
        shards = [data // copies for copies in free["dp_replicate"] or [] if data % copies == 0]
    elif config.parallel.dp_shard != AUTO or config.parallel.dp_replicate != AUTO:
        yield _with(config, **parts)
        return
    else:
        near = max(1, machine.per_node // (parts["tp"] * parts["cp"]))
        shards = sorted({data, near} if parts["zero"] == 3 and data % near == 0 and near > 1 else {data})
    wanted = free.get("dp_replicate")
    for shard in shards:
        if data % shard == 0 and (shard > 1 or data == 1) and (wanted is None or data // shard in wanted):
            yield _with(config, **parts, dp_shard=shard, dp_replicate=data // shard)


def _with(config: Config, **parallel: Any) -> Config:
    """The same settings but for these; only the section that they are in is copied."""
    other = copy(config)
    other.parallel = replace(config.parallel, **parallel)
    return other


def _choices(config: Config, shape: ModelShape, machine: Machine, free: Free) -> list[Choice]:
    """Every cut of the batch under these settings. Raises LayoutError where they are not legal."""
    layout = resolve_layout(config, machine.devices)
    check_shape(config, shape)
    if "micro_batch" not in free:
        return [Choice(layout, resolve_batching(config, layout))]
    among, batch, found = free["micro_batch"], config.train.global_batch, []
    reason = None
    for size in _divisors(batch // layout.data_parallel, of=batch) if among is None else among:
        cut = copy(config)
        cut.train = replace(config.train, micro_batch=size)
        try:
            found.append(Choice(layout, resolve_batching(cut, layout)))
        except LayoutError as error:
            reason = error
    if not found and reason is not None:
        raise reason
    return found


def _divisors(limit: int, of: int | None = None) -> list[int]:
    """Divisors of a number up to a limit, which is the number where none is given."""
    return [n for n in range(1, limit + 1) if (of or limit) % n == 0]
