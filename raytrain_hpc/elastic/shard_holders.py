"""The shards of the training state in a layout: which ranks hold each, and which rank computes one again in an audit.

Dense parameters are sharded over other ranks than those of experts, if there is expert parallelism. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from raytrain_hpc.planner.layout import Layout

ParameterKind = Literal["dense", "experts"]


class ShardPlace(NamedTuple):
    """The place of a rank among the holders of parameters of one kind.

    `group`: coordinates that tell which parameters it holds: pp and tp, and ep for experts. `shard`: which shard of
    them ZeRO gives it. `copy`: number of the rank among those with the same shard.
    """

    group: tuple[int, ...]
    shard: int
    copy: int


@dataclass(frozen=True)
class ShardHolders:
    """The holders of all shards in a layout."""

    layout: Layout

    @property
    def kinds(self) -> tuple[ParameterKind, ...]:
        """The kinds of parameters that are sharded differently."""
        return ("dense", "experts") if self.layout.ep > 1 else ("dense",)

    def get_place(self, kind: ParameterKind, rank: int) -> ShardPlace:
        """Return the place of a rank."""
        coordinates, model_axes = self.layout.get_coordinates(rank), ("pp", "tp")
        group = tuple(coordinates[axis] for axis in model_axes)
        if kind == "dense":
            copy = coordinates["dp_replicate"] * self.layout.cp + coordinates["cp"]
            return ShardPlace(group, coordinates["dp_shard"], copy)
        of_experts = self.layout.get_expert_coordinates(rank)
        return ShardPlace((*group, of_experts["ep"]), of_experts["dp_shard"], of_experts["copies"])

    def count_shards(self, kind: ParameterKind) -> int:
        """Return the number of shards of one group of parameters."""
        return self.layout.dp_shard if kind == "dense" else self.layout.expert_axis_sizes["dp_shard"]

    def count_copies(self, kind: ParameterKind) -> int:
        """Return the number of ranks that hold each shard."""
        return self.layout.num_state_replicas if kind == "dense" else self.layout.expert_axis_sizes["copies"]

    def move(self, kind: ParameterKind, rank: int, shift: int) -> int:
        """Return the rank that holds the shard `shift` further, in the same copy of the same parameters."""
        place = self.get_place(kind, rank)
        return self._ranks[kind][place._replace(shard=(place.shard + shift) % self.count_shards(kind))]

    def find_first(self, kind: ParameterKind, rank: int) -> int:
        """Return the first of the ranks that hold the same shard as a rank."""
        return self._ranks[kind][self.get_place(kind, rank)._replace(copy=0)]

    @cached_property
    def _ranks(self) -> dict[ParameterKind, dict[ShardPlace, int]]:
        ranks = range(self.layout.world_size)
        return {kind: {self.get_place(kind, rank): rank for rank in ranks} for kind in self.kinds}


def choose_shift(draw: int, num_ranks: int) -> int:
    """Return by how many ranks to move an audited shard, for a random number; 0 only for a single rank."""
    return 1 + draw % (num_ranks - 1) if num_ranks > 1 else 0
