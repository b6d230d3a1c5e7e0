"""Process groups and device mesh of one generation. They do not outlive it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.rendezvous import DECISION_KEY, FORMED, Rendezvous
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.mesh_axis import Axis, ExpertMesh
from raytrain_hpc.parallel.pipeline_parallel import StageGroups
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.torch_device import get_backend
from raytrain_hpc.torch_private import clear_dtensor_caches, init_fake_process_group


class GenerationAbortedError(Exception):
    """The generation was aborted because another rank was lost."""


class GroupOptions(TypedDict):
    """Arguments of `init_process_groups` that depend on the model."""

    tied_weights: bool
    balance_experts: bool


@dataclass(frozen=True)
class ParallelContext:
    """The rank, device, coordinates and process groups of one rank in one generation.

    `mesh`: dimensions tp, pp, copies and dp_shard, without those of size 1; "copies" are the ranks that hold
    the same part of the state. `axes`: those along which a model is sharded: tp, ep, ulysses and ring (the two parts of
    cp), without those of size 1, and "tied", the first and the last pipeline stage if they are on two ranks.
    """

    rank: int
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None  # None: a single rank
    axes: dict[str, Axis] = field(default_factory=dict)
    stage_groups: StageGroups | None = None  # to the other pipeline stages; None without pipeline parallelism
    expert_mesh: ExpertMesh | None = None  # None without expert parallelism
    batch_group: dist.ProcessGroup | None = None  # the ranks that process one global batch with the same weights
    state_group: dist.ProcessGroup | None = None  # the ranks that together hold one whole state
    tracer: ComputationTracer = field(default_factory=ComputationTracer)  # of what passes send over axes and stages

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """The group of all ranks; None for a single rank."""
        return None if self.mesh is None else dist.group.WORLD

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the state; None if there is no other."""
        return None if self.mesh is None or self.layout.num_state_replicas == 1 else self.mesh["copies"].get_group()

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis."""
        return self.layout.get_coordinates(self.rank)

    @property
    def should_count_loss(self) -> bool:
        """Whether to include this rank's loss in sums over ranks: tensor-parallel peers compute the same loss."""
        return self.coordinates["tp"] == 0

    @property
    def should_count_tokens(self) -> bool:
        """Whether to count this rank's tokens: tensor- and context-parallel peers read the same microbatch."""
        return self.should_count_loss and self.coordinates["cp"] == 0

    def get_state_ranks(self) -> list[int]:
        """Return the ranks that together hold one whole state, this rank among them."""
        own_replica = self.layout.get_state_replica(self.rank)
        return [rank for rank in range(self.layout.world_size) if self.layout.get_state_replica(rank) == own_replica]


def init_process_groups(
    rendezvous: Rendezvous | None,
    rank: int,
    layout: Layout,
    device: torch.device,
    *,
    tied_weights: bool = False,
    balance_experts: bool = False,
    arrival_timeout_s: float | None = None,
    arm_abort: Callable[[CollectiveAbort], None] = lambda abort: None,
) -> ParallelContext:
    """Create all process groups of a generation. Collective; call on every rank at the start of the generation.

    Creates none for a single rank or without a rendezvous. `tied_weights`: the first and the last pipeline stage share
    a tied embedding table. `balance_experts`: ranks sum the loads of their experts, which needs `batch_group`.
    `arrival_timeout_s`: for all ranks to call this, instead of the timeout of the rendezvous. `arm_abort`: is given
    what ends this call from another thread; replace that abort afterwards. Raises GenerationAbortedError if that was
    done, or if a rank is lost before all have arrived or does not arrive within the timeout.
    """
    if rendezvous is None or layout.world_size == 1:
        return ParallelContext(rank, layout, device)
    abort = CollectiveAbort({}, (rendezvous.host, rendezvous.port))
    arm_abort(abort)
    try:
        _init_default_group(rendezvous, rank, layout, device, arrival_timeout_s or rendezvous.timeout_s)
        return build_parallel_context(rank, layout, device, tied_weights=tied_weights, balance_experts=balance_experts)
    except RuntimeError as error:  # of any group: its text says only that the store has closed the connection
        if abort.is_aborted:
            raise GenerationAbortedError("a rank was lost while process groups were created") from error
        raise


def _init_default_group(
    rendezvous: Rendezvous, rank: int, layout: Layout, device: torch.device, arrival_timeout_s: float
) -> None:
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    prefixed_store = PrefixStore(f"generation-{rendezvous.generation}", store)
    _wait_for_all_ranks(prefixed_store, layout.world_size, arrival_timeout_s)
    backend = get_backend(device).process_group
    try:
        dist.init_process_group(backend, store=prefixed_store, rank=rank, world_size=layout.world_size, timeout=timeout)
    except BaseException:
        # torch has counted the group, and the number is part of the keys in the store. Destroying a group resets it.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()
        raise


@contextmanager
def simulate_process_groups(
    rank: int, layout: Layout, device: torch.device, *, tied_weights: bool = False, balance_experts: bool = False
) -> Iterator[ParallelContext]:
    """Create the process groups of a rank in this process alone, without its peers, and destroy them at the end.

    Their collectives return at once, most with undefined results; see `init_fake_process_group`. Drop all models that
    use the groups before the context ends. Other arguments as in `init_process_groups`.
    """
    if layout.world_size == 1:
        yield ParallelContext(rank, layout, device)
        return
    init_fake_process_group(rank, layout.world_size)
    try:
        yield build_parallel_context(rank, layout, device, tied_weights=tied_weights, balance_experts=balance_experts)
    finally:
        destroy_process_groups()


def build_parallel_context(
    rank: int, layout: Layout, device: torch.device, *, tied_weights: bool, balance_experts: bool
) -> ParallelContext:
    """Create the subgroups of a rank within the existing default group. Arguments as in `init_process_groups`.

    Collective: every rank creates the same groups in the same order.
    """
    mesh = _build_mesh(layout, device)
    tracer = ComputationTracer()
    axes, stage_groups = _build_axes(rank, layout, mesh, tracer), _build_stage_groups(rank, layout, tracer)
    if tied_weights:
        axes |= _build_tied_axis(rank, layout)
    batch_group = _new_subgroup(layout, lambda member: _pp_tp_ranks(layout, member)) if balance_experts else None
    expert_mesh = None if layout.ep == 1 else _build_expert_mesh(rank, layout, device)
    return ParallelContext(
        rank,
        layout,
        device,
        mesh,
        axes,
        stage_groups,
        expert_mesh,
        batch_group,
        _build_state_group(layout, mesh),
        tracer,
    )


def _wait_for_all_ranks(store: PrefixStore, world_size: int, timeout_s: float) -> None:
    """Wait until all ranks have arrived, before groups are created.

    Without it, ranks that create groups with a rank that has just died would wait for the full timeout. Each rank
    increments a counter, and the last one sets the decision, so the cost per rank is constant. Raises
    GenerationAbortedError if the driver reports a lost rank first, or after the timeout.
    """
    if store.add("arrived", 1) == world_size:
        store.set(DECISION_KEY, FORMED)
    try:
        store.wait([DECISION_KEY], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise GenerationAbortedError(f"not all ranks of this generation arrived within {timeout_s:g} s") from error
    if store.get(DECISION_KEY).decode() != FORMED:
        raise GenerationAbortedError("a rank of this generation was lost before its process groups were created")


def _build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Build the device mesh without axes of size 1, so that plain data parallelism creates no group of its own."""
    ranks = torch.arange(layout.world_size).view(layout.axis_sizes)
    sizes = {"tp": layout.tp, "pp": layout.pp, "copies": layout.num_state_replicas, "dp_shard": layout.dp_shard}
    mesh_sizes = {name: size for name, size in sizes.items() if size > 1}
    grid = ranks.permute(4, 0, 1, 3, 2).reshape(*mesh_sizes.values())
    return DeviceMesh(device.type, grid, mesh_dim_names=tuple(mesh_sizes))


def _build_axes(rank: int, layout: Layout, mesh: DeviceMesh, tracer: ComputationTracer) -> dict[str, Axis]:
    """Build the axes ep, tp, ulysses and ring, without those of size 1. Collective.

    What ranks of "ep" exchange belongs to the microbatches of all of them: its dispatcher traces it.
    """
    axes = {}
    coordinates = layout.get_coordinates(rank)
    if layout.ep > 1:
        group = _new_subgroup(layout, lambda member: _ep_group_key(layout, member))
        axes["ep"] = Axis("ep", group, layout.get_expert_coordinates(rank)["ep"], layout.ep)
    if layout.tp > 1:
        axes["tp"] = Axis("tp", mesh["tp"].get_group(), coordinates["tp"], layout.tp, tracer=tracer)
    ulysses, ring = layout.ulysses, layout.cp // layout.ulysses
    if ulysses > 1:  # adjacent ranks for the all-to-all; the ring spans larger distances
        group = _new_subgroup(layout, lambda member: _cp_group_key(layout, member, lambda cp: cp // ulysses))
        axes["ulysses"] = Axis("ulysses", group, coordinates["cp"] % ulysses, ulysses, tracer=tracer)
    if ring > 1:
        group = _new_subgroup(layout, lambda member: _cp_group_key(layout, member, lambda cp: cp % ulysses))
        axes["ring"] = Axis("ring", group, coordinates["cp"] // ulysses, ring, tracer=tracer)
    return axes


def _ep_group_key(layout: Layout, rank: int) -> Hashable:
    """Return a key that is equal for the ranks among which one set of all experts is distributed."""
    coordinates = layout.get_expert_coordinates(rank)
    return (_pp_tp_ranks(layout, rank), coordinates["dp_shard"], coordinates["copies"])


def _pp_tp_ranks(layout: Layout, rank: int) -> Hashable:
    """Return the pp and tp coordinates of a rank."""
    coordinates = layout.get_coordinates(rank)
    return coordinates["pp"], coordinates["tp"]


def _build_expert_mesh(rank: int, layout: Layout, device: torch.device) -> ExpertMesh:
    """Build the groups of ranks with the same experts: their replicas, and the mesh that shards them. Collective."""

    def group_key(*axes: str) -> Callable[[int], Hashable]:
        """Return a function that maps a rank to its pp and tp coordinates and these expert coordinates."""

        def key(member: int) -> Hashable:
            coordinates = layout.get_expert_coordinates(member)
            return (_pp_tp_ranks(layout, member), *(coordinates[axis] for axis in axes))

        return key

    sizes = layout.expert_axis_sizes
    replica_group = _new_subgroup(layout, group_key("ep", "dp_shard")) if sizes["copies"] > 1 else None
    if sizes["dp_shard"] == 1:
        return ExpertMesh(replica_group)
    groups = [] if replica_group is None else [replica_group]
    groups.append(_new_subgroup(layout, group_key("ep", "copies")))
    own_key = group_key("ep")(rank)
    ranks = [member for member in range(layout.world_size) if group_key("ep")(member) == own_key]
    ranks.sort(
        key=lambda member: (
            layout.get_expert_coordinates(member)["copies"],
            layout.get_expert_coordinates(member)["dp_shard"],
        )
    )
    if replica_group is None:
        return ExpertMesh(None, DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=("dp_shard",)))
    grid = torch.tensor(ranks).view(sizes["copies"], sizes["dp_shard"])
    names = ("copies", "dp_shard")
    return ExpertMesh(replica_group, DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=names))


def _build_tied_axis(rank: int, layout: Layout) -> dict[str, Axis]:
    """Build the axis of the first and the last pipeline stage; empty if both are on one rank. Collective."""
    ends = sorted(
        {layout.pipeline.get_rank_of_stage(0), layout.pipeline.get_rank_of_stage(layout.pipeline.num_stages - 1)}
    )
    if len(ends) == 1:
        return {}
    group, pp_rank = _new_stage_group(layout, ends), _pp_rank(layout, rank)
    return {"tied": Axis("tied", group, ends.index(pp_rank), 2)} if pp_rank in ends else {}


def _build_stage_groups(rank: int, layout: Layout, tracer: ComputationTracer) -> StageGroups | None:
    """Build this rank's groups to other pipeline ranks, one per pair and direction. Collective."""
    if layout.pp == 1:
        return None
    groups = {}
    for edge in layout.pipeline.edges:
        group = _new_stage_group(layout, edge)
        if _pp_rank(layout, rank) in edge:
            groups[edge] = group
    coordinates = layout.get_coordinates(rank)
    return StageGroups(groups, [layout.get_rank({**coordinates, "pp": pp}) for pp in range(layout.pp)], tracer=tracer)


def _pp_rank(layout: Layout, rank: int) -> int:
    return layout.get_coordinates(rank)["pp"]


def _new_stage_group(layout: Layout, pp_ranks: Collection[int]) -> dist.ProcessGroup:
    """Create the group of these pipeline ranks, within each pipeline. Collective; unusable on other pipeline ranks."""

    def pipeline_key(rank: int) -> Hashable:
        """Return the coordinates other than pp, or None for a rank outside `pp_ranks`."""
        coordinates = layout.get_coordinates(rank)
        return tuple(coordinates.values())[1:] if coordinates["pp"] in pp_ranks else None

    return _new_subgroup(layout, pipeline_key)


def _cp_group_key(layout: Layout, rank: int, subgroup: Callable[[int], int]) -> Hashable:
    """Return a key that is equal for ranks that differ in cp only and have the same `subgroup(cp)`."""
    coordinates = layout.get_coordinates(rank)
    cp = subgroup(coordinates.pop("cp"))
    return (*coordinates.values(), cp)


def _build_state_group(layout: Layout, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks that together hold one whole state; None if each rank holds all of it."""
    sizes = (("tp", layout.tp), ("pp", layout.pp), ("dp_shard", layout.dp_shard))
    sharded_axes = [name for name, size in sizes if size > 1]
    if not sharded_axes and layout.ep == 1:
        return None
    if layout.num_state_replicas == 1 or layout.ep > 1:
        return dist.group.WORLD
    return (
        mesh[sharded_axes[0]].get_group() if len(sharded_axes) == 1 else _new_subgroup(layout, layout.get_state_replica)
    )


def _new_subgroup(layout: Layout, key: Callable[[int], Hashable]) -> dist.ProcessGroup:
    """Create one group per distinct key, except None, and return this rank's.

    Collective over all ranks: every rank must create all groups in the same order.
    """
    members: dict[Hashable, list[int]] = {}
    for rank in range(layout.world_size):
        members.setdefault(key(rank), []).append(rank)
    groups = [ranks for group_key, ranks in members.items() if group_key is not None]
    own_group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return own_group


def new_host_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks for tensors in host memory, independent of the other groups. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def destroy_process_groups() -> None:
    """Destroy all groups of this generation. Call at its end, also after an error: it frees peers that wait here.

    gloo closes a group's connections only when the last reference to the group is gone. The model must therefore have
    been released; the garbage collector removes its reference cycles (FSDP creates some).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        clear_dtensor_caches()
        gc.collect()
