"""State loader: restores a rank's state from the memory of ranks, from a checkpoint, or by rollback during a run."""

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

RECENT_LOSSES = "losses"  # part of the state only if loss spikes are detected
GENERATORS = "generators"  # random generators of a script; earlier versions did not save them
CALLBACK_PREFIX = "callbacks."  # of the tensors that are the state of callbacks, which runs may add and remove
_EXPERT_BIAS_SUFFIX = ".router.bias"  # present if a bias balances the experts
_PUBLISH_TIMEOUT_S = 30.0  # for the driver to publish a checkpoint that all ranks have written
_POLL_INTERVAL_S = 0.05


def restore_state(
    spec: WorkerSpec,
    context: ParallelContext,
    state: ShardedState,
    memory_state: ShardedState,
    peer_info: PeerInfo,
    store: CheckpointStore,
) -> None:
    """Restore the state from memory or from a checkpoint. A fresh run may load weights of another run."""
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
    """Fill the state from a checkpoint. Raises CheckpointError unless it has exactly the tensors of this model.

    Recent losses and the state of callbacks may be missing on either side, since `fault.loss_spike_deviations` and the
    callbacks of a run may change.
    """
    checkpoint_index, state_index = (
        index.select(name for name in index if not _is_optional(name))
        for index in (checkpoint.index, merge_indexes(indexes))
    )
    if difference := find_difference(checkpoint_index, state_index):
        raise CheckpointError(f"{checkpoint.path} is of another model: {difference}; choose another run.dir")
    stored = (shard for shard in state if not _is_optional(shard.name) or shard.name in checkpoint.index)
    read_state(checkpoint, ShardedState(stored))


def _is_optional(name: str) -> bool:
    return name in (RECENT_LOSSES, GENERATORS) or name.startswith(CALLBACK_PREFIX)


def load_model_weights(checkpoint: Checkpoint, state: ShardedState, indexes: list[StateIndex]) -> None:
    """Fill the weights from a checkpoint of the same model. Other state is ignored; LoRA adapters start fresh."""
    checkpoint_index, state_index = (
        index.select(name for name in index if _is_base_weight(name))
        for index in (checkpoint.index, merge_indexes(indexes))
    )
    # The two runs may balance experts differently: a bias that only one of them has starts fresh.
    names = {
        name
        for name in (*checkpoint_index, *state_index)
        if not name.endswith(_EXPERT_BIAS_SUFFIX) or (name in checkpoint_index and name in state_index)
    }
    checkpoint_index, state_index = checkpoint_index.select(names), state_index.select(names)
    if difference := find_difference(checkpoint_index, state_index):
        raise CheckpointError(f"run.init_from: {checkpoint.path} is of another model: {difference}")
    read_merged_state(checkpoint, ShardedState(shard for shard in state if shard.name in names))


def _is_base_weight(name: str) -> bool:
    """Return whether a tensor is a weight that another run can provide, as LoRA adapters are not."""
    return name.startswith("model.") and LORA_MARKER not in name


@dataclass
class CheckpointRollback:
    """Rollback of all ranks to the newest checkpoint during a run."""

    store: CheckpointStore
    context: ParallelContext
    state: ShardedState
    indexes: list[StateIndex]
    get_last_due_step: Callable[[int], int]  # the last step up to a given one of which a checkpoint was due
    wait_for_writes: Callable[[], object]  # waits until this rank's part of the last checkpoint is written
    on_restored: Callable[[], None]  # called after the state was filled

    def __call__(self, step: int) -> int:
        """Restore the newest checkpoint after `step` committed steps, and return its step. Collective.

        Raises RunFailedError on every rank if there is no valid checkpoint.
        """
        self.wait_for_writes()
        chosen_step = torch.tensor(
            [self._find_newest_step(step) if self.context.rank == 0 else 0], device=self.context.device
        )
        if self.context.world_group is not None:
            dist.broadcast(chosen_step, 0)
        if chosen_step < 0:
            raise RunFailedError(
                f"step {step + 1}: fault.on_nan=rollback, but there is no checkpoint to restore; set "
                "checkpoint.interval or fault.on_nan=skip"
            )
        load_checkpoint(read_manifest(self.store.get_path(int(chosen_step))), self.state, self.indexes)
        self.on_restored()
        return int(chosen_step)

    def _find_newest_step(self, step: int) -> int:
        """Return the step of the newest valid checkpoint, or -1.

        Waits for the latest one to be published, so that the choice does not depend on the speed of a disk.
        """
        expected_step, deadline = self.get_last_due_step(step), time.monotonic() + _PUBLISH_TIMEOUT_S
        while expected_step and expected_step not in self.store.list_steps() and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)
        newest = self.store.find_newest_valid(lambda path, reason: None)
        return -1 if newest is None else newest.step
