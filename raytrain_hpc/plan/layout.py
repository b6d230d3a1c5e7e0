"""Axis sizes, rank <-> coordinate, which layouts are legal, and how a step's microbatches are shared out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from raytrain_hpc.config import AUTO, Config
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.shape import ModelShape

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # outermost first: the last axis has neighbouring ranks


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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    @property
    def data_parallel(self) -> int:
        """Ranks that read different microbatches."""
        return self.dp_replicate * self.dp_shard

    @property
    def copies(self) -> int:
        """Ranks that hold the same part of the state: replicas, and context-parallel peers."""
        return self.dp_replicate * self.cp

    def copy(self, rank: int) -> int:
        """Which of the `copies` a rank belongs to."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.cp + at["cp"]

    @property
    def lockstep(self) -> bool:
        """Whether collectives run inside every microbatch, so that all ranks must run the same number of them."""
        return self.zero >= 2 and self.dp_shard > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> coordinate of a rank."""
        result = {}
        for axis, size in zip(reversed(AXES), reversed(self.sizes), strict=True):
            result[axis] = rank % size
            rank //= size
        return {axis: result[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """The rank that stands at these coordinates; axes left out count as 0."""
        rank = 0
        for axis, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def data_rank(self, rank: int) -> int:
        """Which of the `data_parallel` shares of the batch a rank reads."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def describe(self) -> str:
        """One phrase for the console and for records."""
        axes = " ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1)
        return f"{self.world} x {axes or 'one rank'}, zero={self.zero}" if self.world > 1 else "1 rank"


@dataclass(frozen=True)
class Batching:
    """How a step's global batch is cut: `count` logical microbatches of `size` sequences, for the life of a run."""

    count: int
    size: int

    def shares(self, degree: int) -> list[range]:
        """The microbatches of each data-parallel rank: contiguous runs, sizes at most one apart."""
        return [range(r * self.count // degree, (r + 1) * self.count // degree) for r in range(degree)]


def fixed_world(config: Config) -> int | None:
    """Number of ranks that the settings fix by themselves, None where the cluster decides."""
    if config.cluster.workers != AUTO:
        return max(1, int(config.cluster.workers))
    data_axes = (config.parallel.dp_replicate, config.parallel.dp_shard)
    if AUTO in (data_axes[:1] if config.parallel.zero == 0 else data_axes):
        return None
    sizes = [int(axis) for axis in data_axes if axis != AUTO]
    return prod(sizes) * config.parallel.tp * config.parallel.cp * config.parallel.pp


def least_world(config: Config) -> int:
    """The fewest ranks that the settings allow: axes left `auto` count as one."""
    p = config.parallel
    axes = (p.dp_replicate, p.dp_shard, p.tp, p.cp, p.pp) if p.zero else (p.dp_replicate, p.tp, p.cp, p.pp)
    return fixed_world(config) or prod(1 if axis == AUTO else int(axis) for axis in axes)


def check_axes(config: Config) -> None:
    """Raise LayoutError for an axis that no number of ranks can make fit."""
    p = config.parallel
    for axis in ("pp", "ep"):
        if getattr(p, axis) > 1:
            remedy = "this version has data, tensor and context parallelism; set it to 1"
            raise LayoutError(f"parallel.{axis}", getattr(p, axis), config.origin(f"parallel.{axis}"), remedy)
    for axis in ("tp", "cp"):
        if config.train.compile and getattr(p, axis) > 1:
            remedy = "train.compile is not proven together with it yet; set train.compile=false"
            raise LayoutError(f"parallel.{axis}", getattr(p, axis), config.origin(f"parallel.{axis}"), remedy)
    if p.cp % p.ulysses:
        raise LayoutError("parallel.ulysses", p.ulysses, config.origin("parallel.ulysses"), f"must divide cp={p.cp}")
    if p.zero == 0 and p.dp_shard not in (AUTO, 1):
        remedy = "zero=0 shards nothing; set parallel.zero to 1, 2 or 3, or dp_shard to 1"
        raise LayoutError("parallel.dp_shard", p.dp_shard, config.origin("parallel.dp_shard"), remedy)


def check_shape(config: Config, shape: ModelShape) -> None:
    """Raise LayoutError where a rank would be left without a part of the model or of the sequence."""
    p, length = config.parallel, config.train.seq_len
    tensor = {
        "attention heads": shape.num_heads,
        "feed-forward channels": shape.ffn_size,
        "tokens in the vocabulary": shape.vocab_size,
    }
    needs = [("tp", p.tp, what, count) for what, count in tensor.items()]
    heads = f"attention heads on each of {p.tp} tensor-parallel ranks"
    needs.append(("ulysses", p.ulysses, heads, shape.num_heads // p.tp))
    # The members of a ring hold two chunks each; every chunk and every share of one needs a position.
    parts = 2 * p.cp * p.tp if p.cp > 1 else p.tp
    needs.append(("cp" if p.cp > 1 else "tp", parts, "positions in a sequence", length))
    for axis, count, what, there in needs:
        if count > there:
            value = getattr(p, axis)
            remedy = f"there are {there} {what}, and this layout needs at least {count}; use a smaller one"
            raise LayoutError(f"parallel.{axis}", value, config.origin(f"parallel.{axis}"), remedy)


def resolve_layout(config: Config, world: int) -> Layout:
    """Fill the `auto` data axes for `world` ranks. Raises LayoutError naming the axis that does not fit."""
    check_axes(config)
    p = config.parallel
    data = world
    for axis in ("tp", "cp"):
        size = getattr(p, axis)
        if data % size:
            remedy = f"must divide the {data} workers" + ("" if axis == "tp" else f" that tp={p.tp} leaves")
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
    layout = Layout(dp_replicate=replicate, dp_shard=shard, cp=p.cp, tp=p.tp, zero=p.zero, ulysses=p.ulysses)
    if layout.world != world:
        axes = f"dp_replicate={replicate} x dp_shard={shard}"
        axes += "".join(f" x {axis}={getattr(p, axis)}" for axis in ("cp", "tp") if getattr(p, axis) > 1)
        remedy = (
            f"{axes} makes {layout.world} ranks, not {world}; set cluster.workers={layout.world} or leave an axis auto"
        )
        raise LayoutError("cluster.workers", config.cluster.workers, config.origin("cluster.workers"), remedy)
    return layout


def resolve_batching(config: Config, layout: Layout, stored: Batching | None = None) -> Batching:
    """The run's microbatches: those stored in its checkpoint, else from `train.micro_batch`.

    Raises LayoutError where a data-parallel rank would have no microbatch, or where the settings ask for another
    cut than the one the run was started with.
    """
    t, origin, degree = config.train, config.origin, layout.data_parallel
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
        counts = [v for v in range(1, t.global_batch + 1) if t.global_batch % v == 0 and v >= degree]
        if not counts:
            remedy = f"{degree} data-parallel ranks need at least {degree} sequences a step"
            raise LayoutError("train.global_batch", t.global_batch, origin("train.global_batch"), remedy)
        batching = Batching(counts[0], t.global_batch // counts[0])
    else:
        batching = Batching(t.global_batch // int(t.micro_batch), int(t.micro_batch))
    if batching.count < degree:
        remedy = (
            f"global batch {t.global_batch} in microbatches of {batching.size} gives {batching.count} of them, too few "
            f"for {degree} data-parallel ranks; use at most {batching.count} workers or a smaller micro_batch"
        )
        raise LayoutError("train.micro_batch", t.micro_batch, origin("train.micro_batch"), remedy)
    return batching
