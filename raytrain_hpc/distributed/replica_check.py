"""The replica check: detects silent data corruption by comparing checksums of the replicas' state."""

from __future__ import annotations

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.audit_verdict import CORRUPT
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.state.sharded_state import ShardedState, find_divergent_ranks


class CorruptionError(Exception):
    """Silent corruption on some ranks, raised on all of them.

    `corrupt_ranks`: those to replace, none if unknown; `kind`: of their failure. `suspects`: ranks of which at least
    one is to be replaced.
    """

    kind = CORRUPT

    def __init__(self, corrupt_ranks: tuple[int, ...], reason: str, suspects: tuple[int, ...] = ()):
        self.corrupt_ranks, self.suspects = corrupt_ranks, suspects
        super().__init__(reason)


class ReplicaMismatchError(CorruptionError):
    """Replicas differ. `ranks`: those that disagree with the majority; without a majority, all that differ."""

    def __init__(self, ranks: tuple[int, ...], has_majority: bool):
        self.ranks = ranks
        detail = "the other replicas agree" if has_majority else "there is no majority"
        super().__init__(
            ranks if has_majority else (), f"ranks {', '.join(map(str, ranks))} differ from their replicas; {detail}"
        )


class ReplicaCheck:
    """The comparison of this rank's state with the ranks that must hold the same.

    Under expert parallelism, the replicas of expert weights are on other ranks than those of the dense weights.
    `callback_state`: the part of the state that callbacks of the user must have alike on all ranks.
    """

    def __init__(self, state: ShardedState, context: ParallelContext, callback_state: ShardedState | None = None):
        self._callback_state = callback_state or ShardedState()
        names = {shard.name for shard in self._callback_state}
        state = ShardedState(shard for shard in state if shard.name not in names)
        self._device, self._world_size = context.device, context.layout.world_size
        self._world_group, self._replica_groups = context.world_group, [(state, context.replica_group)]
        if context.expert_mesh is not None:
            experts = ShardedState(shard for shard in state if ".experts." in shard.name)
            dense = ShardedState(shard for shard in state if ".experts." not in shard.name)
            self._replica_groups = [(dense, context.replica_group), (experts, context.expert_mesh.replica_group)]

    def compare(self) -> None:
        """Compare all replicas. Collective over all ranks.

        Call after the state was loaded, every `fault.replica_check_interval` steps after the optimizer step, and
        before a checkpoint. Raises ReplicaMismatchError on all ranks if any replicas differ, and CallbackError if only
        the state of callbacks does.
        """
        if self._world_group is None:
            return
        # One flag per rank: it differs. The last flag: a group has no majority.
        flags = torch.zeros(self._world_size + 1, dtype=torch.int64, device=self._device)
        for state, group in self._replica_groups:
            if group is not None and (divergent := find_divergent_ranks(state, group, self._device)):
                ranks = dist.get_process_group_ranks(group)
                flags[[ranks[group_rank] for group_rank in divergent]] = 1
                flags[-1] = max(int(flags[-1]), int(2 * len(divergent) >= len(ranks)))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._world_group)
        *is_divergent, is_tie = flags.tolist()
        if any(is_divergent):
            raise ReplicaMismatchError(tuple(rank for rank, flag in enumerate(is_divergent) if flag), not is_tie)
        if len(self._callback_state):
            self._compare_callback_state(self._world_group)

    def _compare_callback_state(self, group: dist.ProcessGroup) -> None:
        if ranks := find_divergent_ranks(self._callback_state, group, self._device):
            raise CallbackError(
                f"callbacks: state_dict returns other values on ranks {', '.join(map(str, ranks))} than on the others; "
                "derive it from values that all ranks have, such as metrics['train/loss']"
            )
