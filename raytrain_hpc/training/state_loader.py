"""Fills a rank's state: with what ranks hold in memory, from a checkpoint, and from an earlier one in mid-run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.checkpoint.manifest import Checkpoint, read_manifest
from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import CheckpointError, RunFailedError
from raytrain_hpc.model.lora import LORA_MARKER
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.shard_index import StateIndex, find_difference, merge_indexes
from raytrain_hpc.state.sharded_state import ShardedState

RECENT_LOSSES = "losses"  # the recent ones: state only where spikes are looked for
_EXPERT_BIAS_SUFFIX = ".router.bias"  # of experts, where that is how they are balanced
_PUBLISH_TIMEOUT_S = 30.0  # until a checkpoint that all ranks have written is there
_POLL_INTERVAL_S = 0.01


def restore_state(
    spec: WorkerSpec,
    context: ParallelContext,
    state: ShardedState,
    memory_state: ShardedState,
    peer_info: PeerInfo,
    store: CheckpointStore,
) -> None:
    """Fill the state from what is offered of memory, from a checkpoint, or not at all; or weights from another run."""
    if spec.memory_step is not None:
        reshard_state(
            state,
            memory_state,
            context.world_group,
            context.device,
            (peer_info.source_indexes, peer_info.destination_indexes),
        )
    elif spec.resume_step is not None:
        load_checkpoint(read_manifest(store.get_path(spec.resume_step)), state, peer_info.destination_indexes)
    elif spec.init_checkpoint is not None:
        load_model_weights(read_manifest(spec.init_checkpoint), state, peer_info.destination_indexes)


def load_checkpoint(checkpoint: Checkpoint, state: ShardedState, indexes: list[StateIndex]) -> None:
    """Fill the state, having made sure that the checkpoint holds this model's tensors: no more and no fewer.

    Recent losses need not be there, and are not looked at where nobody asks for them: that setting may change.
    """
    model, mine = (index.select(set(index) - {RECENT_LOSSES}) for index in (checkpoint.index, merge_indexes(indexes)))
    if difference := find_difference(model, mine):
        raise CheckpointError(f"{checkpoint.path} is of another model: {difference} there; choose another run.dir")
    known = RECENT_LOSSES in checkpoint.index
    read_state(checkpoint, ShardedState(held for held in state if known or held.name != RECENT_LOSSES))


def load_model_weights(checkpoint: Checkpoint, state: ShardedState, indexes: list[StateIndex]) -> None:
    """Fill the model alone, from a checkpoint that holds the same one, whatever else it holds; adapters are added."""
    there, mine = (
        index.select(name for name in index if _is_base_weight(name))
        for index in (checkpoint.index, merge_indexes(indexes))
    )
    # The balancing of experts may be another one than there: what only one of the two has begins anew.
    known = {
        name for name in (*there, *mine) if not name.endswith(_EXPERT_BIAS_SUFFIX) or (name in there and name in mine)
    }
    there, mine = there.select(known), mine.select(known)
    if difference := find_difference(there, mine):
        raise CheckpointError(f"run.init_from: {checkpoint.path} is of another model: {difference} there")
    read_merged_state(checkpoint, ShardedState(held for held in state if held.name in known))


def _is_base_weight(name: str) -> bool:
    """Whether it is part of a model that another run can have, too: adapters begin anew."""
    return name.startswith("model.") and LORA_MARKER not in name


@dataclass
class CheckpointRollback:
    """Makes the state that of the newest checkpoint again, on all ranks alike, in the middle of a run."""

    store: CheckpointStore
    interval: int  # steps between checkpoints
    context: ParallelContext
    state: ShardedState
    indexes: list[StateIndex]
    wait_for_writes: Callable[[], object]  # waits until this rank's part of the last checkpoint is written
    release_memory: Callable[[], None]  # called when moments were filled

    def __call__(self, step: int) -> int:
        """Collective, after `step` committed steps. Returns the step whose state is now live.

        Raises RunFailed, on every rank, where there is no valid checkpoint.
        """
        self.wait_for_writes()
        chosen = torch.tensor(
            [self._find_newest_step(step) if self.context.rank == 0 else 0], device=self.context.device
        )
        if self.context.world_group is not None:
            dist.broadcast(chosen, 0)
        if chosen < 0:
            raise RunFailedError(
                f"step {step + 1}: fault.on_nan=rollback, but there is no checkpoint to go back to; set "
                "checkpoint.every, or use fault.on_nan=skip"
            )
        load_checkpoint(read_manifest(self.store.get_path(int(chosen))), self.state, self.indexes)
        self.release_memory()
        return int(chosen)

    def _find_newest_step(self, step: int) -> int:
        """Of the one that is due by now, if it comes: which one is gone back to must not depend on a disk's speed."""
        due, until = (
            step // self.interval * self.interval if self.interval else 0,
            time.monotonic() + _PUBLISH_TIMEOUT_S,
        )
        while due and due not in self.store.list_steps() and time.monotonic() < until:
            time.sleep(_POLL_INTERVAL_S)
        newest = self.store.find_newest_valid(lambda path, reason: None)
        return -1 if newest is None else newest.step
