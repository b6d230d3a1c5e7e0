"""Process groups and mesh of one generation. Nothing bound to them outlives it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from raytrain_hpc.distributed.rendezvous import DECISION_KEY, FORMED, Rendezvous
from raytrain_hpc.parallel.mesh_axis import Axis, ExpertMesh
from raytrain_hpc.parallel.pipeline_parallel import StageGroups
from raytrain_hpc.planner.layout import Layout


class GenerationAbortedError(Exception):
    """Not this rank's fault: another one is gone."""


@dataclass(frozen=True)
class ParallelContext:
    """Where one rank stands: its number, its device, and its groups.

    `mesh` has the axes tp, pp, copies and dp_shard, as far as they have more than one rank; "copies" are the ranks that
    hold the same part of the state. `axes` are those that a model is cut along: tp, ep, and cp's ring and ulysses; and
    "tied", the first and the last stage of a pipeline, where they are on two ranks.
    """

    rank: int
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None  # None: one rank alone
    axes: dict[str, Axis] = field(default_factory=dict)
    stage_groups: StageGroups | None = None  # to the other stages of the pipeline
    expert_mesh: ExpertMesh | None = None  # where experts are shared out
    batch_group: dist.ProcessGroup | None = None  # the ranks that see a step's batch together, with the same weights
    state_group: dist.ProcessGroup | None = None  # the ranks that hold one whole state together

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """All ranks, None where there is one."""
        return None if self.mesh is None else dist.group.WORLD

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold what this one holds, None where there is no other."""
        return None if self.mesh is None or self.layout.num_state_replicas == 1 else self.mesh["copies"].get_group()

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis."""
        return self.layout.get_coordinates(self.rank)

    @property
    def should_count_loss(self) -> bool:
        """Whether the loss that this rank computes counts: tensor-parallel peers compute the same one."""
        return self.coordinates["tp"] == 0

    @property
    def should_count_tokens(self) -> bool:
        """Whether this rank's tokens count: tensor- and context-parallel peers read the same microbatch."""
        return self.should_count_loss and self.coordinates["cp"] == 0

    def get_state_ranks(self) -> list[int]:
        """The ranks that hold one whole state together, this one among them."""
        mine = self.layout.get_state_replica(self.rank)
        return [rank for rank in range(self.layout.world_size) if self.layout.get_state_replica(rank) == mine]


def init_process_groups(
    rendezvous: Rendezvous | None,
    rank: int,
    layout: Layout,
    device: torch.device,
    *,
    tied_weights: bool = False,
    balance_experts: bool = False,
) -> ParallelContext:
    """Form the groups of this generation. One rank alone, or no meeting place, forms none.

    `tied`: the first and the last stage of a pipeline each hold a copy of one table. `balanced`: ranks count together
    what their experts had to do.
    """
    if rendezvous is None or layout.world_size == 1:
        return ParallelContext(rank, layout, device)
    timeout = timedelta(seconds=rendezvous.timeout_s)
    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    prefixed = PrefixStore(f"generation-{rendezvous.generation}", store)
    _wait_for_all_ranks(prefixed, layout.world_size, rendezvous.timeout_s)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=layout.world_size, timeout=timeout)
    return build_parallel_context(rank, layout, device, tied_weights=tied_weights, balance_experts=balance_experts)


def build_parallel_context(
    rank: int, layout: Layout, device: torch.device, *, tied_weights: bool, balance_experts: bool
) -> ParallelContext:
    """The groups of a rank in the process group of all; as in `join`. Every rank makes the same ones in one order."""
    mesh = _build_mesh(layout, device)
    axes, links = _build_axes(rank, layout, mesh), _build_stage_groups(rank, layout)
    if tied_weights:
        axes |= _build_tied_axis(rank, layout)
    batch = _new_subgroup(layout, lambda other: _pp_tp_ranks(layout, other)) if balance_experts else None
    experts = None if layout.ep == 1 else _build_expert_mesh(rank, layout, device)
    return ParallelContext(rank, layout, device, mesh, axes, links, experts, batch, _build_state_group(layout, mesh))


def _wait_for_all_ranks(store: PrefixStore, world_size: int, timeout_s: float) -> None:
    """Come together before groups are formed: there, who waits for a rank that has just died waits for the timeout.

    They count themselves, and each asks once, however many they are. Raises GenerationFallen where the driver says that
    a rank has died.
    """
    if store.add("here", 1) == world_size:
        store.set(DECISION_KEY, FORMED)
    try:
        store.wait([DECISION_KEY], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise GenerationAbortedError(f"not all ranks of this generation came within {timeout_s:g} s") from error
    if store.get(DECISION_KEY).decode() != FORMED:
        raise GenerationAbortedError("a rank of this generation was lost before it had formed its groups")


def _build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """Axes of one rank need no group: leaving them out makes a plain data-parallel mesh cost no group of its own."""
    ranks = torch.arange(layout.world_size).view(layout.axis_sizes)
    sizes = {"tp": layout.tp, "pp": layout.pp, "copies": layout.num_state_replicas, "dp_shard": layout.dp_shard}
    kept = {name: size for name, size in sizes.items() if size > 1}
    grid = ranks.permute(4, 0, 1, 3, 2).reshape(*kept.values())
    return DeviceMesh(device.type, grid, mesh_dim_names=tuple(kept))


def _build_axes(rank: int, layout: Layout, mesh: DeviceMesh) -> dict[str, Axis]:
    axes = {}
    at = layout.get_coordinates(rank)
    if layout.ep > 1:
        group = _new_subgroup(layout, lambda other: _ep_group_key(layout, other))
        axes["ep"] = Axis("ep", group, layout.get_expert_coordinates(rank)["ep"], layout.ep)
    if layout.tp > 1:
        axes["tp"] = Axis("tp", mesh["tp"].get_group(), at["tp"], layout.tp)
    exchanging, ring = layout.ulysses, layout.cp // layout.ulysses
    if exchanging > 1:  # neighbouring ranks: this is all to all; the ring goes further
        group = _new_subgroup(layout, lambda other: _cp_group_key(layout, other, lambda cp: cp // exchanging))
        axes["ulysses"] = Axis("ulysses", group, at["cp"] % exchanging, exchanging)
    if ring > 1:
        group = _new_subgroup(layout, lambda other: _cp_group_key(layout, other, lambda cp: cp % exchanging))
        axes["ring"] = Axis("ring", group, at["cp"] // exchanging, ring)
    return axes


def _ep_group_key(layout: Layout, rank: int) -> Hashable:
    at = layout.get_expert_coordinates(rank)
    return (_pp_tp_ranks(layout, rank), at["dp_shard"], at["copies"])


def _pp_tp_ranks(layout: Layout, rank: int) -> Hashable:
    at = layout.get_coordinates(rank)
    return at["pp"], at["tp"]


def _build_expert_mesh(rank: int, layout: Layout, device: torch.device) -> ExpertMesh:
    def beside(*axes: str) -> Callable[[int], Hashable]:
        def key(other: int) -> Hashable:
            at = layout.get_expert_coordinates(other)
            return (_pp_tp_ranks(layout, other), *(at[axis] for axis in axes))

        return key

    sizes = layout.expert_axis_sizes
    copies = _new_subgroup(layout, beside("ep", "dp_shard")) if sizes["copies"] > 1 else None
    if sizes["dp_shard"] == 1:
        return ExpertMesh(copies)
    groups = [] if copies is None else [copies]
    groups.append(_new_subgroup(layout, beside("ep", "copies")))
    mine = beside("ep")(rank)
    ranks = [other for other in range(layout.world_size) if beside("ep")(other) == mine]
    ranks.sort(
        key=lambda other: (
            layout.get_expert_coordinates(other)["copies"],
            layout.get_expert_coordinates(other)["dp_shard"],
        )
    )
    if copies is None:
        return ExpertMesh(None, DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=("dp_shard",)))
    grid = torch.tensor(ranks).view(sizes["copies"], sizes["dp_shard"])
    names = ("copies", "dp_shard")
    return ExpertMesh(copies, DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=names))


def _build_tied_axis(rank: int, layout: Layout) -> dict[str, Axis]:
    """The axis of the first and the last stage, on their two ranks."""
    ends = sorted(
        {layout.pipeline.get_rank_of_stage(0), layout.pipeline.get_rank_of_stage(layout.pipeline.num_stages - 1)}
    )
    if len(ends) == 1:
        return {}
    group, at = _new_stage_group(layout, ends), _pp_rank(layout, rank)
    return {"tied": Axis("tied", group, ends.index(at), 2)} if at in ends else {}


def _build_stage_groups(rank: int, layout: Layout) -> StageGroups | None:
    if layout.pp == 1:
        return None
    groups = {}
    for edge in layout.pipeline.edges:
        group = _new_stage_group(layout, edge)
        if _pp_rank(layout, rank) in edge:
            groups[edge] = group
    at = layout.get_coordinates(rank)
    return StageGroups(groups, [layout.get_rank({**at, "pp": pp}) for pp in range(layout.pp)])


def _pp_rank(layout: Layout, rank: int) -> int:
    return layout.get_coordinates(rank)["pp"]


def _new_stage_group(layout: Layout, pp_ranks: Collection[int]) -> dist.ProcessGroup:
    """The group of the ranks of one pipeline that stand here; on other ranks it is of no use."""

    def pipeline(rank: int) -> Hashable:
        at = layout.get_coordinates(rank)
        return tuple(at.values())[1:] if at["pp"] in pp_ranks else None

    return _new_subgroup(layout, pipeline)


def _cp_group_key(layout: Layout, rank: int, subgroup: Callable[[int], int]) -> Hashable:
    at = layout.get_coordinates(rank)
    cp = subgroup(at.pop("cp"))
    return (*at.values(), cp)


def _build_state_group(layout: Layout, mesh: DeviceMesh) -> dist.ProcessGroup | None:
    sizes = (("tp", layout.tp), ("pp", layout.pp), ("dp_shard", layout.dp_shard))
    sharing = [name for name, size in sizes if size > 1]
    if not sharing and layout.ep == 1:
        return None
    if layout.num_state_replicas == 1 or layout.ep > 1:
        return dist.group.WORLD
    return mesh[sharing[0]].get_group() if len(sharing) == 1 else _new_subgroup(layout, layout.get_state_replica)


def _new_subgroup(layout: Layout, key: Callable[[int], Hashable]) -> dist.ProcessGroup:
    """This rank's group of those that share a key, if not None. Every rank of the world makes all, in one order."""
    members: dict[Hashable, list[int]] = {}
    for rank in range(layout.world_size):
        members.setdefault(key(rank), []).append(rank)
    groups = [ranks for shared, ranks in members.items() if shared is not None]
    mine: dist.ProcessGroup = dist.new_subgroups_by_enumeration(groups)[0]  # type: ignore[no-untyped-call]
    return mine


def new_host_group() -> dist.ProcessGroup:
    """A group of all ranks that moves what is in host memory, beside all others. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


def destroy_process_groups() -> None:
    """Give up the groups of this generation, and with them whoever waits for this rank in one.

    gloo closes a group's connections when nothing refers to it any more, and not before: the model has to be gone,
    whose circles of references (FSDP's) only the collector finds.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        _clear_dtensor_caches()
        gc.collect()


def _clear_dtensor_caches() -> None:
    """Have DTensor, if it is in use, forget the results of operations, which it keeps by the ranks in a mesh.

    They hold the groups of that mesh. And the mesh of a later generation can have the same ranks where this process is
    another one of them: a parameter would come with the old mesh, and with another rank's place in it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None:
        module.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


def set_network_interface(name: str) -> None:
    """Make gloo and NCCL talk over one network interface. Must come before the first group."""
    for backend in ("GLOO", "NCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = name
