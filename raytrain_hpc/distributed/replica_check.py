"""Replicas compared: a bit that silently changed on one of them is found at the next comparison."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.state.sharded_state import ShardedState, find_divergent_replicas


class ReplicaMismatchError(Exception):
    """After a step `ranks` hold something else than most of their replicas; all that differ, where there is no most."""

    def __init__(self, ranks: tuple[int, ...], has_majority: bool):
        self.ranks, self.has_majority = ranks, has_majority
        found = "the others agree" if has_majority else "as many hold the one as the other"
        super().__init__(f"ranks {', '.join(map(str, ranks))} differ from their replicas; {found}")


class ReplicaCheck:
    """What this rank holds, and the ranks that must hold the same: of experts others than of the rest."""

    def __init__(self, state: ShardedState, context: ParallelContext):
        self._device, self._world_size = context.device, context.layout.world_size
        self._world_group, self._replica_groups = context.world_group, [(state, context.replica_group)]
        if context.expert_mesh is not None:
            of_experts = ShardedState(held for held in state if ".experts." in held.name)
            dense = ShardedState(held for held in state if ".experts." not in held.name)
            self._replica_groups = [(dense, context.replica_group), (of_experts, context.expert_mesh.replica_group)]

    def compare(self) -> None:
        """Raise ReplicasDiffer, on all ranks of the world, where some that should hold the same do not. Collective."""
        if self._world_group is None:
            return
        verdict = torch.zeros(
            self._world_size + 1, dtype=torch.int64, device=self._device
        )  # who differs; whether in a tie
        for part, group in self._replica_groups:
            if group is not None and (strangers := find_divergent_replicas(part, group, self._device)):
                ranks = dist.get_process_group_ranks(group)
                verdict[[ranks[one] for one in strangers]] = 1
                verdict[-1] = max(int(verdict[-1]), int(2 * len(strangers) >= len(ranks)))
        dist.all_reduce(verdict, op=dist.ReduceOp.MAX, group=self._world_group)
        *differs, tie = verdict.tolist()
        if any(differs):
            raise ReplicaMismatchError(tuple(rank for rank, one in enumerate(differs) if one), not tie)
