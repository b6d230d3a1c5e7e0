"""Replicas compared: a bit that silently changed on one of them is found at the next comparison."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import Place
from raytrain_hpc.state.sharded_state import Holding, replicas_that_differ


class ReplicasDiffer(Exception):
    """After a step `ranks` hold something else than most of their replicas; all that differ, where there is no most."""

    def __init__(self, ranks: tuple[int, ...], most: bool):
        self.ranks, self.most = ranks, most
        found = "the others agree" if most else "as many hold the one as the other"
        super().__init__(f"ranks {', '.join(map(str, ranks))} differ from their replicas; {found}")


class Replicas:
    """What this rank holds, and the ranks that must hold the same: of experts others than of the rest."""

    def __init__(self, holding: Holding, place: Place):
        self._device, self._world = place.device, place.layout.world
        self._everybody, self._compared = place.world_group, [(holding, place.copies_group)]
        if place.experts is not None:
            of_experts = Holding(held for held in holding if ".experts." in held.name)
            dense = Holding(held for held in holding if ".experts." not in held.name)
            self._compared = [(dense, place.copies_group), (of_experts, place.experts.copies)]

    def compare(self) -> None:
        """Raise ReplicasDiffer, on all ranks of the world, where some that should hold the same do not. Collective."""
        if self._everybody is None:
            return
        verdict = torch.zeros(self._world + 1, dtype=torch.int64, device=self._device)  # who differs; whether in a tie
        for part, group in self._compared:
            if group is not None and (strangers := replicas_that_differ(part, group, self._device)):
                ranks = dist.get_process_group_ranks(group)
                verdict[[ranks[one] for one in strangers]] = 1
                verdict[-1] = max(int(verdict[-1]), int(2 * len(strangers) >= len(ranks)))
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=self._everybody)
        *differs, tie = verdict.tolist()
        if any(differs):
            raise ReplicasDiffer(tuple(rank for rank, one in enumerate(differs) if one), not tie)
