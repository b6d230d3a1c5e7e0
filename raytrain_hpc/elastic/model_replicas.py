"""The model replicas of a layout, by data-parallel rank, and the traces of which a computation by one consists."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raytrain_hpc.planner.layout import Layout

# (rank, number of one of its traces): 0 is that of its own microbatch, 1 + s that of its experts for the rank with "ep"
# coordinate s. See parallel/computation_trace.py.
Place = tuple[int, int]


@dataclass(frozen=True)
class ModelReplicas:
    """The ranks that compute the microbatches of each data-parallel rank."""

    layout: Layout

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.layout.dp_size

    def move(self, rank: int, shift: int) -> int:
        """Return the rank at the same place of another replica: that of the data-parallel rank `shift` further."""
        coordinates = self.layout.get_coordinates(rank)
        dp_rank = (self.layout.get_dp_rank(rank) + shift) % self.dp_size
        replicate, shard = divmod(dp_rank, self.layout.dp_shard)
        return self.layout.get_rank({**coordinates, "dp_replicate": replicate, "dp_shard": shard})

    def get_expert_peers(self, rank: int) -> list[int]:
        """Return the ranks that a rank shares one set of experts with, in the order of their "ep" coordinates."""
        return self._expert_groups[self._get_expert_key(rank)] if self.layout.ep > 1 else [rank]

    def list_places(self, dp_rank: int) -> list[Place]:
        """Return the traces of a microbatch that a data-parallel rank computes, in the same order for all of them."""
        return self._places[dp_rank]

    @cached_property
    def _places(self) -> list[list[Place]]:
        places: list[list[Place]] = [[] for _ in range(self.dp_size)]
        for rank in range(self.layout.world_size):
            places[self.layout.get_dp_rank(rank)].append((rank, 0))
        for of_replica in places if self.layout.ep > 1 else ():
            for rank, _ in tuple(of_replica):
                peers = self.get_expert_peers(rank)
                of_replica += [(peer, 1 + peers.index(rank)) for peer in peers]
        return places

    @cached_property
    def _expert_groups(self) -> dict[tuple[int, ...], list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        by_ep = sorted(range(self.layout.world_size), key=lambda rank: self.layout.get_expert_coordinates(rank)["ep"])
        for rank in by_ep:
            groups.setdefault(self._get_expert_key(rank), []).append(rank)
        return groups

    def _get_expert_key(self, rank: int) -> tuple[int, ...]:
        place, coordinates = self.layout.get_expert_coordinates(rank), self.layout.get_coordinates(rank)
        return place["dp_shard"], place["copies"], coordinates["pp"], coordinates["tp"]
