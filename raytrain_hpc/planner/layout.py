"""Axis sizes, rank <-> coordinate, which layouts are legal, and how a step's microbatches are shared out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.planner.pipeline_schedule import PipelineSchedule, ScheduleName

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: the last axis has neighbouring ranks
EP_FOLDED_AXES = ("cp", "dp_shard", "dp_replicate")  # the axes that experts are shared out over, innermost first


@dataclass(frozen=True)
class Layout:
    """The size of every mesh axis and the ZeRO stage. `world` ranks in row-major order over AXES."""

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    zero: int = 0
    ulysses: int = 1  # ranks of cp that exchange positions for heads; the rest of cp is a ring
    schedule: ScheduleName = "1f1b"  # of the pipeline
    virtual_stages: int = 1  # stages a pipeline rank
    ep: int = 1  # ranks that share out experts, folded out of cp, dp_shard and dp_replicate, innermost first

    @property
    def axis_sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.axis_sizes)

    @property
    def dp_size(self) -> int:
        """Ranks that read different microbatches."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_state_replicas(self) -> int:
        """Ranks that hold the same part of the state: replicas, and context-parallel peers."""
        return self.dp_replicate * self.cp

    def get_state_replica(self, rank: int) -> int:
        """Which of the replicas of the whole state a rank belongs to; with expert parallelism there is but one."""
        at = self.get_coordinates(rank)
        return 0 if self.ep > 1 else at["dp_replicate"] * self.cp + at["cp"]

    def get_expert_coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands among those of its pp and tp coordinates, as far as experts go.

        `ep`: which of the experts it has; `dp_shard`: which shard of them; `copies`: which copy of that.
        """
        at, left = self.get_coordinates(rank), self.ep
        rest = {}
        for axis in EP_FOLDED_AXES:
            size = getattr(self, axis)
            taken = min(left, size)
            left //= taken
            rest[axis] = at[axis] // taken, size // taken
        data = self.get_dp_rank(rank) * self.cp + at["cp"]
        copy = rest["dp_replicate"][0] * rest["cp"][1] + rest["cp"][0]
        return {"ep": data % self.ep, "dp_shard": rest["dp_shard"][0], "copies": copy}

    @property
    def expert_axis_sizes(self) -> dict[str, int]:
        """How many of each of `place_of_experts` there are."""
        last = self.get_expert_coordinates(self.world_size - 1)
        return {axis: number + 1 for axis, number in last.items()}

    @property
    def pipeline(self) -> PipelineSchedule:
        """The schedule of the pipeline; without one it has one rank and one stage."""
        return PipelineSchedule(self.schedule, self.pp, self.virtual_stages if self.pp > 1 else 1)

    @property
    def is_lockstep(self) -> bool:
        """Whether collectives run between the passes of a step, so that all ranks must run the same number of them."""
        return self.ep > self.cp or (self.dp_shard > 1 and (self.zero >= 2 or self.pp > 1))

    def get_coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of a rank."""
        result = {}
        for axis, size in zip(reversed(AXES), reversed(self.axis_sizes), strict=True):
            result[axis] = rank % size
            rank //= size
        return {axis: result[axis] for axis in AXES}

    def get_rank(self, coordinates: dict[str, int]) -> int:
        """The rank that stands at these coordinates; axes left out count as 0."""
        rank = 0
        for axis, size in zip(AXES, self.axis_sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def get_dp_rank(self, rank: int) -> int:
        """Which of the `data_parallel` shares of the batch a rank reads."""
        at = self.get_coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def describe(self) -> str:
        """One phrase for the console and for records."""
        sizes = [*zip(AXES, self.axis_sizes, strict=True), ("ep", self.ep)]
        axes = " ".join(f"{axis}={size}" for axis, size in sizes if size > 1)
        return f"{self.world_size} x {axes or 'one rank'}, zero={self.zero}" if self.world_size > 1 else "1 rank"


@dataclass(frozen=True)
class Batching:
    """How a step's global batch is cut: `count` logical microbatches of `size` sequences, for the life of a run."""

    count: int
    size: int

    def split_by_rank(self, dp_size: int) -> list[range]:
        """The microbatches of each data-parallel rank: contiguous runs, sizes at most one apart."""
        return [range(r * self.count // dp_size, (r + 1) * self.count // dp_size) for r in range(dp_size)]


def find_first_rank(layout: Layout, batching: Batching, microbatches: Collection[int]) -> int | None:
    """The lowest rank that one of these microbatches goes to; None where there is none."""
    shares = batching.split_by_rank(layout.dp_size)
    mine = (
        any(number in shares[layout.get_dp_rank(rank)] for number in microbatches) for rank in range(layout.world_size)
    )
    return next((rank for rank, found in enumerate(mine) if found), None)


def get_model_parallel_size(config: Config) -> int:
    """Ranks that one microbatch takes: the axes that cut a model or a sequence."""
    return config.parallel.tp * config.parallel.cp * config.parallel.pp


def get_fixed_world_size(config: Config) -> int | None:
    """Number of ranks that the settings fix by themselves, None where the cluster decides."""
    if config.cluster.workers != AUTO:
        return max(1, int(config.cluster.workers))
    data_axes = (config.parallel.dp_replicate, config.parallel.dp_shard)
    if AUTO in (data_axes[:1] if config.parallel.zero == 0 else data_axes):
        return None
    sizes = [int(axis) for axis in data_axes if axis != AUTO]
    return prod(sizes) * get_model_parallel_size(config)


def get_min_world_size(config: Config) -> int:
    """The fewest ranks that the settings allow: axes left `auto` count as one."""
    p = config.parallel
    axes = (p.dp_replicate, p.dp_shard) if p.zero else (p.dp_replicate,)
    return get_fixed_world_size(config) or get_model_parallel_size(config) * prod(
        1 if axis == AUTO else int(axis) for axis in axes
    )


def check_axes(config: Config) -> None:
    """Raise LayoutError for an axis that no number of ranks can make fit."""
    p = config.parallel
    if p.ep > 1 and config.model.num_experts < p.ep:
        remedy = f"there are {config.model.num_experts} experts (model.num_experts); use at most as many ranks"
        raise LayoutError("parallel.ep", p.ep, config.origin("parallel.ep"), remedy)
    if p.virtual_stages != AUTO and not _is_valid_virtual_stages(p.schedule, int(p.virtual_stages)):
        remedy = f"{p.schedule} has {'two stages' if p.schedule == 'zbv' else 'one stage'} a rank; leave it auto"
        raise LayoutError("parallel.virtual_stages", p.virtual_stages, config.origin("parallel.virtual_stages"), remedy)
    for axis in ("tp", "cp", "pp"):
        if config.train.compile and getattr(p, axis) > 1:
            remedy = "train.compile is not proven together with it yet; set train.compile=false"
            raise LayoutError(f"parallel.{axis}", getattr(p, axis), config.origin(f"parallel.{axis}"), remedy)
    if p.cp % p.ulysses:
        raise LayoutError("parallel.ulysses", p.ulysses, config.origin("parallel.ulysses"), f"must divide cp={p.cp}")
    for key, needed in (("reshard_over", 3), ("quantize", 1)):
        if getattr(p, key) not in (0, "none") and p.zero < needed:
            stages = "parallel.zero=3" if needed == 3 else "parallel.zero=1, 2 or 3"
            raise LayoutError(f"parallel.{key}", getattr(p, key), config.origin(f"parallel.{key}"), f"needs {stages}")
    if config.train.deterministic == "elastic":
        _check_elastic(config)
    if p.tile_mib and (p.zero != 3 or config.train.compile):
        remedy = "only ZeRO-3 gathers weights layer by layer; set parallel.zero=3 or parallel.tile_mib=0"
        if p.zero == 3:
            remedy = "train.compile is not proven together with it yet; set train.compile=false"
        raise LayoutError("parallel.tile_mib", p.tile_mib, config.origin("parallel.tile_mib"), remedy)
    if p.zero == 0 and p.dp_shard not in (AUTO, 1):
        remedy = "zero=0 shards nothing; set parallel.zero to 1, 2 or 3, or dp_shard to 1"
        raise LayoutError("parallel.dp_shard", p.dp_shard, config.origin("parallel.dp_shard"), remedy)


def _check_elastic(config: Config) -> None:
    p, remedy = config.parallel, "not bit for bit under train.deterministic=elastic; set it to false or true, or {}"
    apart = [
        ("ep", p.ep > 1, "parallel.ep=1"),
        ("quantize", p.quantize in ("gradients", "both"), "parallel.quantize=weights"),
        ("schedule", p.pp > 1 and p.schedule in ("interleaved_zero_bubble", "zbv"), "a schedule without split passes"),
    ]
    for axis, broken, other in apart:
        if broken:
            key = f"parallel.{axis}"
            raise LayoutError(key, getattr(p, axis), config.origin(key), remedy.format(other))


def _is_valid_virtual_stages(schedule: ScheduleName, virtual: int) -> bool:
    return virtual == 2 if schedule == "zbv" else virtual == 1 or schedule.startswith("interleaved")


def get_virtual_stages(config: Config) -> int:
    """Stages a pipeline rank: what the settings say, else two for schedules that know more than one."""
    p = config.parallel
    if p.virtual_stages != AUTO:
        return int(p.virtual_stages)
    return 1 if p.schedule in ("gpipe", "1f1b") else 2


def check_model_divisible(config: Config, shape: ModelSpec) -> None:
    """Raise LayoutError where a rank would be left without a part of the model or of the sequence."""
    p, length = config.parallel, config.train.seq_len
    tensor = {
        "attention heads": shape.num_heads,
        "feed-forward channels": shape.ffn_size,
    }
    needs = [("tp", p.tp, what, count) for what, count in tensor.items()]
    heads = f"attention heads on each of {p.tp} tensor-parallel ranks"
    needs.append(("ulysses", p.ulysses, heads, shape.num_heads // p.tp))
    # The members of a ring hold two chunks each; every chunk and every share of one needs a position.
    parts = 2 * p.cp * p.tp if p.cp > 1 else p.tp
    needs.append(("cp" if p.cp > 1 else "tp", parts, "positions in a sequence", length))
    if p.pp > 1:
        needs.append(("pp", p.pp * get_virtual_stages(config), "layers", shape.num_layers))
    for axis, count, what, there in needs:
        if count > there:
            value = getattr(p, axis)
            remedy = f"there are {there} {what}, and this layout needs at least {count}; use a smaller one"
            raise LayoutError(f"parallel.{axis}", value, config.origin(f"parallel.{axis}"), remedy)


def resolve_layout(config: Config, world_size: int) -> Layout:
    """Fill the `auto` data axes for `world` ranks. Raises LayoutError naming the axis that does not fit."""
    check_axes(config)
    p = config.parallel
    data = world_size
    for number, axis in enumerate(inner := ("tp", "cp", "pp")):
        size = getattr(p, axis)
        if data % size:
            taken = " and ".join(f"{other}={getattr(p, other)}" for other in inner[:number] if getattr(p, other) > 1)
            remedy = f"must divide the {data} workers" + (f" that {taken} leaves" if taken else "")
            raise LayoutError(f"parallel.{axis}", size, config.origin(f"parallel.{axis}"), remedy)
        data //= size
    if p.zero == 0:
        replicate, shard = data if p.dp_replicate == AUTO else int(p.dp_replicate), 1
    else:
        replicate = 1 if p.dp_replicate == AUTO else int(p.dp_replicate)
        if p.dp_shard == AUTO and p.dp_replicate != AUTO and data % replicate:
            remedy = f"must divide the {data} data-parallel ranks"
            raise LayoutError("parallel.dp_replicate", replicate, config.origin("parallel.dp_replicate"), remedy)
        shard = data // replicate if p.dp_shard == AUTO else int(p.dp_shard)
        if p.dp_replicate == AUTO and data % shard == 0:
            replicate = data // shard
    layout = Layout(
        dp_replicate=replicate,
        dp_shard=shard,
        pp=p.pp,
        cp=p.cp,
        tp=p.tp,
        zero=p.zero,
        ulysses=p.ulysses,
        schedule=p.schedule,
        virtual_stages=get_virtual_stages(config),
        ep=p.ep,
    )
    if layout.world_size != world_size:
        axes = f"dp_replicate={replicate} x dp_shard={shard}"
        axes += "".join(f" x {axis}={getattr(p, axis)}" for axis in ("pp", "cp", "tp") if getattr(p, axis) > 1)
        remedy = f"{axes} makes {layout.world_size} ranks, not {world_size}; set cluster.workers={layout.world_size} or leave an axis auto"
        raise LayoutError("cluster.workers", config.cluster.workers, config.origin("cluster.workers"), remedy)
    _check_folding(config, layout)
    if p.reshard_over and layout.dp_shard % p.reshard_over:
        remedy = f"must divide dp_shard={layout.dp_shard}"
        raise LayoutError("parallel.reshard_over", p.reshard_over, config.origin("parallel.reshard_over"), remedy)
    return layout


def _check_folding(config: Config, layout: Layout) -> None:
    left = layout.ep
    for axis in EP_FOLDED_AXES:
        size = getattr(layout, axis)
        if left % size and size % left:
            break
        left //= min(left, size)
    if left > 1 or layout.dp_size * layout.cp % layout.ep:
        axes = " x ".join(f"{axis}={getattr(layout, axis)}" for axis in EP_FOLDED_AXES)
        remedy = f"experts are shared out over {axes} in this order, and must fill one before the next"
        raise LayoutError("parallel.ep", layout.ep, config.origin("parallel.ep"), remedy)


def resolve_batching(config: Config, layout: Layout, stored: Batching | None = None) -> Batching:
    """The run's microbatches: those stored in its checkpoint, else from `train.micro_batch`.

    Raises LayoutError where a data-parallel rank would have no microbatch, or where the settings ask for another
    cut than the one the run was started with.
    """
    t, origin, degree = config.train, config.origin, layout.dp_size
    if stored is not None:
        if stored.count * stored.size != t.global_batch:
            before = stored.count * stored.size
            remedy = f"the run in {config.run.dir} was started with {before}; set it back or choose another run.dir"
            raise LayoutError("train.global_batch", t.global_batch, origin("train.global_batch"), remedy)
        if t.micro_batch not in (AUTO, stored.size):
            remedy = f"the run in {config.run.dir} was started with {stored.size}; its order depends on it"
            raise LayoutError("train.micro_batch", t.micro_batch, origin("train.micro_batch"), remedy)
        batching = stored
    elif t.micro_batch == AUTO:
        batching = _choose_batching(config, layout)
    else:
        batching = Batching(t.global_batch // int(t.micro_batch), int(t.micro_batch))
    if batching.count < degree:
        remedy = (
            f"global batch {t.global_batch} in microbatches of {batching.size} gives {batching.count} of them, too few "
            f"for {degree} data-parallel ranks; use at most {batching.count} workers or a smaller micro_batch"
        )
        raise LayoutError("train.micro_batch", t.micro_batch, origin("train.micro_batch"), remedy)
    if reason := _find_schedule_conflict(batching, layout):
        remedy = f"{reason}; use another micro_batch, or parallel.schedule=1f1b, which takes any number"
        raise LayoutError("train.micro_batch", t.micro_batch, origin("train.micro_batch"), remedy)
    return batching


def _choose_batching(config: Config, layout: Layout) -> Batching:
    """As few microbatches as give every rank work; in a pipeline, four times as many as it has ranks, if there are."""
    batch, degree = config.train.global_batch, layout.dp_size
    counts = [v for v in range(degree, batch + 1) if batch % v == 0]
    if not counts:
        remedy = f"{degree} data-parallel ranks need at least {degree} sequences a step"
        raise LayoutError("train.global_batch", batch, config.origin("train.global_batch"), remedy)
    if layout.pp == 1:
        return Batching(counts[0], batch // counts[0])
    taken = [v for v in counts if _find_schedule_conflict(Batching(v, batch // v), layout) is None] or counts
    count = next((v for v in taken if v >= 4 * layout.pp * degree), taken[-1])
    return Batching(count, batch // count)


def _find_schedule_conflict(batching: Batching, layout: Layout) -> str | None:
    counts = {batching.count // layout.dp_size, -(-batching.count // layout.dp_size)}
    if layout.is_lockstep:
        counts = {max(counts)}
    refusals = (layout.pipeline.find_conflict(count) for count in sorted(counts))
    return next((reason for reason in refusals if reason is not None), None)
