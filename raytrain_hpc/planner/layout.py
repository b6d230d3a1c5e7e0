"""Parallel layout: mesh axis sizes (torchtitan: ParallelDims), rank coordinates, validity checks, and microbatches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.pipeline_schedule import PipelineSchedule, ScheduleName

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: ranks along the last axis are adjacent
EP_FOLDED_AXES = ("cp", "dp_shard", "dp_replicate")  # axes that expert parallelism is folded out of, innermost first


@dataclass(frozen=True)
class Layout:
    """A parallel layout: the size of every mesh axis and the ZeRO stage.

    The `world_size` ranks are in row-major order over AXES. Expert parallelism has no axis of its own: the `ep` ranks
    are folded out of the axes in EP_FOLDED_AXES.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    ulysses: int = 1  # cp ranks that exchange positions for heads; the rest of cp is a ring
    schedule: ScheduleName = "1f1b"  # pipeline schedule
    virtual_stages: int = 1  # stages per pipeline rank
    ep: int = 1  # ranks that the experts are split over, see EP_FOLDED_AXES

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.axis_sizes)

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different microbatches."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_state_replicas(self) -> int:
        """Number of ranks that hold the same shard of the dense state: replicas and context-parallel peers."""
        return self.dp_replicate * self.cp

    def get_state_replica(self, rank: int) -> int:
        """Return the replica of the whole state that a rank belongs to. With expert parallelism there is only one."""
        coordinates = self.get_coordinates(rank)
        return 0 if self.ep > 1 else coordinates["dp_replicate"] * self.cp + coordinates["cp"]

    def get_expert_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank for expert state, among the ranks with the same pp and tp coordinates.

        `ep`: the group of experts that the rank holds; `dp_shard`: the shard of these experts; `copies`: the replica of
        that shard.
        """
        coordinates, ep_left = self.get_coordinates(rank), self.ep
        remaining = {}
        for axis in EP_FOLDED_AXES:
            size = getattr(self, axis)
            ep_taken = min(ep_left, size)
            ep_left //= ep_taken
            remaining[axis] = coordinates[axis] // ep_taken, size // ep_taken
        dp_cp_rank = self.get_dp_rank(rank) * self.cp + coordinates["cp"]
        replica = remaining["dp_replicate"][0] * remaining["cp"][1] + remaining["cp"][0]
        return {"ep": dp_cp_rank % self.ep, "dp_shard": remaining["dp_shard"][0], "copies": replica}

    @property
    def expert_axis_sizes(self) -> dict[str, int]:
        """Axis sizes for expert state, with the keys of `get_expert_coordinates`."""
        last = self.get_expert_coordinates(self.world_size - 1)
        return {axis: coordinate + 1 for axis, coordinate in last.items()}

    @property
    def pipeline(self) -> PipelineSchedule:
        """Pipeline schedule. Without pipeline parallelism it is 1f1b with one rank and one stage."""
        if self.pp == 1:
            return PipelineSchedule("1f1b", 1, 1)
        return PipelineSchedule(self.schedule, self.pp, self.virtual_stages)

    @property
    def is_lockstep(self) -> bool:
        """Whether collectives run between the passes of a step, so that all ranks must run equally many passes."""
        return self.ep > self.cp or (self.dp_shard > 1 and (self.zero >= 2 or self.pp > 1))

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every mesh axis."""
        coordinates = {}
        for axis, size in zip(reversed(AXES), reversed(self.axis_sizes), strict=True):
            coordinates[axis] = rank % size
            rank //= size
        return {axis: coordinates[axis] for axis in AXES}

    def get_rank(self, coordinates: dict[str, int]) -> int:
        """Return the rank at these coordinates. Axes left out count as 0."""
        rank = 0
        for axis, size in zip(AXES, self.axis_sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def get_dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank, which selects the share of the batch that a rank reads."""
        coordinates = self.get_coordinates(rank)
        return coordinates["dp_replicate"] * self.dp_shard + coordinates["dp_shard"]

    def describe(self) -> str:
        """Format the layout as a phrase for the console and for records."""
        sizes = [*zip(AXES, self.axis_sizes, strict=True), ("ep", self.ep)]
        axes = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
        return f"{self.world_size} x {axes or 'one rank'}, zero={self.zero}" if self.world_size > 1 else "1 rank"


@dataclass(frozen=True)
class Batching:
    """The split of a step's global batch into `count` microbatches of `size` sequences, fixed for the whole run."""

    count: int
    size: int

    def split_by_rank(self, dp_size: int) -> list[range]:
        """Return the microbatches of each data-parallel rank, as contiguous ranges of sizes at most one apart."""
        return [range(r * self.count // dp_size, (r + 1) * self.count // dp_size) for r in range(dp_size)]


def find_first_rank(layout: Layout, batching: Batching, microbatches: Collection[int]) -> int | None:
    """Return the lowest rank that reads one of these microbatches, or None."""
    microbatches_by_dp_rank = batching.split_by_rank(layout.dp_size)
    reads_any = (
        any(microbatch in microbatches_by_dp_rank[layout.get_dp_rank(rank)] for microbatch in microbatches)
        for rank in range(layout.world_size)
    )
    return next((rank for rank, reads in enumerate(reads_any) if reads), None)


def get_model_parallel_size(config: Config) -> int:
    """Return the number of ranks per model replica: tp x cp x pp."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def get_fixed_world_size(config: Config) -> int | None:
    """Return the number of ranks that the settings fix, or None if it depends on the cluster."""
    if config.cluster.workers != AUTO:
        return max(1, int(config.cluster.workers))
    data_axes = (config.parallel.dp_replicate, config.parallel.dp_shard)
    if AUTO in (data_axes[:1] if config.parallel.zero == 0 else data_axes):
        return None
    sizes = [int(axis) for axis in data_axes if axis != AUTO]
    return prod(sizes) * get_model_parallel_size(config)


def get_min_world_size(config: Config) -> int:
    """Return the fewest ranks that the settings allow. Axes left `auto` are as large as parallel.ep needs."""
    p = config.parallel
    axes = (p.dp_replicate, p.dp_shard) if p.zero else (p.dp_replicate,)
    dp_size = prod(1 if axis == AUTO else int(axis) for axis in axes)
    if AUTO in axes:
        dp_size *= p.ep // gcd(p.ep, dp_size * p.cp)
    return get_fixed_world_size(config) or get_model_parallel_size(config) * dp_size


def check_axes(config: Config) -> None:
    """Raise LayoutError for settings that are invalid for every number of ranks."""
    p = config.parallel
    if p.ep > 1 and config.model.num_experts < p.ep:
        remedy = f"there are {config.model.num_experts} experts (model.num_experts); use at most as many ranks"
        raise LayoutError("parallel.ep", p.ep, config.origin("parallel.ep"), remedy)
    if p.pp_stages_per_rank != AUTO and not _is_valid_stage_count(p.pp_schedule, int(p.pp_stages_per_rank)):
        remedy = (
            f"{p.pp_schedule} has {'two stages' if p.pp_schedule == 'zbv' else 'one stage'} per rank; leave it auto"
        )
        raise LayoutError(
            "parallel.pp_stages_per_rank", p.pp_stages_per_rank, config.origin("parallel.pp_stages_per_rank"), remedy
        )
    if p.cp % p.ulysses:
        raise LayoutError("parallel.ulysses", p.ulysses, config.origin("parallel.ulysses"), f"must divide cp={p.cp}")
    for key, min_zero in (("reshard_over", 3), ("quantize", 1)):
        if getattr(p, key) not in (0, "none") and p.zero < min_zero:
            stages = "parallel.zero=3" if min_zero == 3 else "parallel.zero=1, 2 or 3"
            raise LayoutError(f"parallel.{key}", getattr(p, key), config.origin(f"parallel.{key}"), f"needs {stages}")
    if config.train.deterministic == "elastic":
        _check_elastic(config)
    if p.tile_mib and p.zero != 3:
        remedy = "only ZeRO-3 gathers weights layer by layer; set parallel.zero=3 or parallel.tile_mib=0"
        raise LayoutError("parallel.tile_mib", p.tile_mib, config.origin("parallel.tile_mib"), remedy)
    if p.zero == 0 and p.dp_shard not in (AUTO, 1):
        remedy = "nothing is sharded under parallel.zero=0; set parallel.zero to 1, 2 or 3, or dp_shard to 1"
        raise LayoutError("parallel.dp_shard", p.dp_shard, config.origin("parallel.dp_shard"), remedy)


def _check_elastic(config: Config) -> None:
    quantize, key = config.parallel.quantize, "parallel.quantize"
    if quantize in ("gradients", "both"):
        remedy = (
            "each rank rounds the sum of its own microbatches to int8, so the bits depend on how many ranks there are; "
            "use parallel.quantize=weights, or set train.deterministic to false or true instead of elastic"
        )
        raise LayoutError(key, quantize, config.origin(key), remedy)
    if quantize == "weights" and config.parallel.ep > 1:
        remedy = (
            "weights are rounded where ranks that share them gather them, so that those of experts depend on the "
            "number of ranks; use parallel.ep=1, or set train.deterministic to false or true instead of elastic"
        )
        raise LayoutError(key, quantize, config.origin(key), remedy)


def _is_valid_stage_count(schedule: ScheduleName, virtual: int) -> bool:
    return virtual == 2 if schedule == "zbv" else virtual == 1 or schedule.startswith("interleaved")


def get_virtual_stages(config: Config) -> int:
    """Return the stages per pipeline rank: the setting, else two for schedules that support several."""
    p = config.parallel
    if p.pp_stages_per_rank != AUTO:
        return int(p.pp_stages_per_rank)
    return 1 if p.pp_schedule in ("gpipe", "1f1b") else 2


def check_model_divisible(config: Config, spec: ModelSpec) -> None:
    """Raise LayoutError if a rank would be left without a part of the model or of the sequence."""
    p, length = config.parallel, config.train.seq_len
    tp_items = {
        "attention heads": spec.num_heads,
        "feed-forward channels": spec.ffn_size,
    }
    requirements = [("tp", p.tp, item, count) for item, count in tp_items.items()]
    heads = f"attention heads on each of {p.tp} tensor-parallel ranks"
    requirements.append(("ulysses", p.ulysses, heads, spec.num_heads // p.tp))
    # Each rank of a ring holds two chunks; every tp shard of a chunk needs a position.
    sequence_parts = 2 * p.cp * p.tp if p.cp > 1 else p.tp
    requirements.append(("cp" if p.cp > 1 else "tp", sequence_parts, "positions in a sequence", length))
    if p.pp > 1:
        requirements.append(("pp", p.pp * get_virtual_stages(config), "layers", spec.num_layers))
    for axis, count, item, available in requirements:
        if count > available:
            value = getattr(p, axis)
            remedy = f"there are {available} {item}, and this layout needs at least {count}; use a smaller size"
            raise LayoutError(f"parallel.{axis}", value, config.origin(f"parallel.{axis}"), remedy)


def resolve_layout(config: Config, world_size: int) -> Layout:
    """Fill the `auto` data axes for `world_size` ranks. Raises LayoutError naming the axis that does not fit."""
    check_axes(config)
    p = config.parallel
    dp_size = world_size
    for index, axis in enumerate(inner := ("tp", "cp", "pp")):
        size = getattr(p, axis)
        if dp_size % size:
            taken_axes = " and ".join(
                f"{outer}={getattr(p, outer)}" for outer in inner[:index] if getattr(p, outer) > 1
            )
            remedy = f"must divide the {dp_size} workers" + (f" that {taken_axes} leaves" if taken_axes else "")
            raise LayoutError(f"parallel.{axis}", size, config.origin(f"parallel.{axis}"), remedy)
        dp_size //= size
    if p.zero == 0:
        replicate, shard = dp_size if p.dp_replicate == AUTO else int(p.dp_replicate), 1
    else:
        replicate = 1 if p.dp_replicate == AUTO else int(p.dp_replicate)
        if p.dp_shard == AUTO and p.dp_replicate != AUTO and dp_size % replicate:
            remedy = f"must divide the {dp_size} data-parallel ranks"
            raise LayoutError("parallel.dp_replicate", replicate, config.origin("parallel.dp_replicate"), remedy)
        shard = dp_size // replicate if p.dp_shard == AUTO else int(p.dp_shard)
        if p.dp_replicate == AUTO and dp_size % shard == 0:
            replicate = dp_size // shard
    layout = Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        pp=p.pp,
        cp=p.cp,
        tp=p.tp,
        zero=p.zero,
        ulysses=p.ulysses,
        schedule=p.pp_schedule,
        virtual_stages=get_virtual_stages(config),
        ep=p.ep,
    )
    if layout.world_size != world_size:
        axes = f"dp_replicate={replicate} x dp_shard={shard}"
        axes += "".join(f" x {axis}={getattr(p, axis)}" for axis in ("pp", "cp", "tp") if getattr(p, axis) > 1)
        problem = f"{axes} makes {layout.world_size} ranks, not {world_size}"
        if config.cluster.workers != AUTO:
            key, value, remedy = "cluster.workers", config.cluster.workers, f"set cluster.workers={layout.world_size}"
        else:
            axis = "dp_shard" if p.dp_shard != AUTO and p.zero else "dp_replicate"
            key, value, remedy = f"parallel.{axis}", getattr(p, axis), f"use {layout.world_size} devices"
        raise LayoutError(key, value, config.origin(key), f"{problem}; {remedy}, or leave data-parallel axes auto")
    _check_folding(config, layout)
    if p.reshard_over and layout.dp_shard % p.reshard_over:
        remedy = f"must divide dp_shard={layout.dp_shard}"
        raise LayoutError("parallel.reshard_over", p.reshard_over, config.origin("parallel.reshard_over"), remedy)
    return layout


def _check_folding(config: Config, layout: Layout) -> None:
    ep_left = layout.ep
    for axis in EP_FOLDED_AXES:
        size = getattr(layout, axis)
        if ep_left % size and size % ep_left:
            break
        ep_left //= min(ep_left, size)
    if ep_left > 1 or layout.dp_size * layout.cp % layout.ep:
        axes = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in EP_FOLDED_AXES)
        remedy = f"experts are split over {axes}, in this order; ep must divide each or be a multiple of it"
        raise LayoutError("parallel.ep", layout.ep, config.origin("parallel.ep"), remedy)


def resolve_batching(config: Config, layout: Layout, stored: Batching | None = None) -> Batching:
    """Return the microbatches of a run: those stored in its checkpoint, else those of `train.micro_batch_size`.

    Raises LayoutError if a data-parallel rank would have no microbatch, if the pipeline schedule does not accept their
    number, or if the settings contradict the stored microbatches.
    """
    t, origin, dp_size = config.train, config.origin, layout.dp_size
    if stored is not None:
        if stored.count * stored.size != t.global_batch_size:
            stored_batch = stored.count * stored.size
            remedy = (
                f"the run in {config.run.dir} was started with {stored_batch}; set it back or choose another run.dir"
            )
            raise LayoutError("train.global_batch_size", t.global_batch_size, origin("train.global_batch_size"), remedy)
        if t.micro_batch_size not in (AUTO, stored.size):
            remedy = (
                f"the run in {config.run.dir} was started with {stored.size}, which fixes its data order; set it back"
            )
            raise LayoutError("train.micro_batch_size", t.micro_batch_size, origin("train.micro_batch_size"), remedy)
        batching = stored
    elif t.micro_batch_size == AUTO:
        batching = _choose_batching(config, layout)
    else:
        batching = Batching(t.global_batch_size // int(t.micro_batch_size), int(t.micro_batch_size))
    if batching.count < dp_size:
        remedy = (
            f"global batch {t.global_batch_size} in microbatches of {batching.size} gives {batching.count} "
            f"microbatches, too few for {dp_size} data-parallel ranks; use at most {batching.count} workers or a "
            "smaller micro_batch_size"
        )
        raise LayoutError("train.micro_batch_size", t.micro_batch_size, origin("train.micro_batch_size"), remedy)
    if reason := _find_schedule_conflict(batching, layout):
        remedy = f"{reason}; use another micro_batch_size, or parallel.pp_schedule=1f1b, which takes any number"
        raise LayoutError("train.micro_batch_size", t.micro_batch_size, origin("train.micro_batch_size"), remedy)
    return batching


def _choose_batching(config: Config, layout: Layout) -> Batching:
    """Choose the fewest microbatches that give every rank one, also after growth to `cluster.max_workers`.

    With pipeline parallelism, choose at least four per pipeline rank if the batch is large enough.
    """
    batch, dp_size = config.train.global_batch_size, layout.dp_size
    counts = [count for count in range(dp_size, batch + 1) if batch % count == 0]
    if not counts:
        remedy = f"{dp_size} data-parallel ranks need at least {dp_size} sequences per step"
        raise LayoutError("train.global_batch_size", batch, config.origin("train.global_batch_size"), remedy)
    largest_dp_size = get_largest_dp_size(config, layout)
    counts = [count for count in counts if count >= largest_dp_size] or counts[-1:]
    if layout.pp == 1:
        return Batching(counts[0], batch // counts[0])
    accepted = [
        count for count in counts if _find_schedule_conflict(Batching(count, batch // count), layout) is None
    ] or counts
    count = next((count for count in accepted if count >= 4 * layout.pp * dp_size), accepted[-1])
    return Batching(count, batch // count)


def get_largest_dp_size(config: Config, layout: Layout) -> int:
    """Return the data-parallel ranks that a run may grow to, whose batch is split now: those of cluster.max_workers."""
    max_workers = config.cluster.max_workers
    if max_workers in (AUTO, 0) or config.cluster.workers != AUTO:
        return layout.dp_size
    return max(layout.dp_size, int(max_workers) // (layout.tp * layout.cp * layout.pp))


def _find_schedule_conflict(batching: Batching, layout: Layout) -> str | None:
    counts = {batching.count // layout.dp_size, -(-batching.count // layout.dp_size)}
    if layout.is_lockstep:
        counts = {max(counts)}
    refusals = (layout.pipeline.find_conflict(count) for count in sorted(counts))
    return next((reason for reason in refusals if reason is not None), None)
