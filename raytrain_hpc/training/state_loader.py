"""State loader: restores a rank's state from the memory of ranks, from a checkpoint, or by rollback during a run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.checkpoint.manifest import Checkpoint, read_manifest
from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.shard_io import open_shards, read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import CheckpointError, RunFailedError
from raytrain_hpc.model.lora import LORA_MARKER
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.shard_index import StateIndex, find_difference, merge_indexes
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import parse_location

RECENT_LOSSES = "losses"  # part of the state only if loss spikes are detected
NUM_UPDATES = "updates"  # of the moments of AdamW; earlier versions took the number of steps
GENERATORS = "generators"  # random generators of a script; earlier versions did not save them
CALLBACK_PREFIX = "callbacks."  # of the tensors that are the state of callbacks, which runs may add and remove
_EXPERT_BIAS_SUFFIX = ".router.bias"  # present if a bias balances the experts
_PUBLISH_TIMEOUT_S = 30.0  # for the driver to publish a checkpoint that all ranks have written
_POLL_INTERVAL_S = 0.05


def restore_state(
    spec: WorkerSpec,
    context: ParallelContext,
    state: ShardedState,
    source_state: ShardedState,
    peer_info: PeerInfo,
    store: CheckpointStore,
) -> None:
    """Restore the state from memory or from a checkpoint. A fresh run may load weights of another run.

    `source_state`: that of `get_source_state`; `peer_info` has the indexes of all ranks'.
    """
    if spec.memory_step is not None:
        reshard_state(
            state,
            source_state,
            context.world_group,
            context.device,
            (peer_info.source_indexes, peer_info.destination_indexes),
        )
    elif spec.local_checkpoint is not None:
        load_local_checkpoint(spec.local_checkpoint.name, state, source_state, context, peer_info)
    elif spec.resume_step is not None:
        load_checkpoint(read_manifest(store.get_path(spec.resume_step)), state, peer_info.destination_indexes)
    elif spec.init_checkpoint is not None:
        load_model_weights(read_manifest(spec.init_checkpoint), state, peer_info.destination_indexes)


def get_source_state(spec: WorkerSpec, rank: int, snapshot_store: SnapshotStore | None) -> ShardedState:
    """Return the part of the state to resume from that this rank has: snapshots, or the files on its node.

    Empty if it has none. Files and the snapshots that the node's agent holds are memory-mapped. Raises
    CheckpointCorruptedError if a file cannot be opened. Snapshots that cannot be are missing from the result.
    """
    local = spec.local_checkpoint
    if local is not None:
        files = LocalDirectory.open(spec.config).root / local.name
        checkpoint = LocalCatalog(parse_location(spec.config.run.dir)).read(local.name)
        return open_shards(checkpoint, files, local.files_by_rank[rank])
    if snapshot_store is None or spec.memory_step is None:
        return ShardedState()
    # A rank that took no part in that generation can have another version of the step, from before a restart.
    is_same = spec.memory_generation in (None, snapshot_store.generation)
    state = snapshot_store.get_state(spec.memory_step) if is_same else ShardedState()
    for handles in spec.held_snapshots.get(rank, ()):
        with contextlib.suppress(OSError):  # the agent has ended: reported as lost state
            held = AttachedSnapshots(handles).get_state(spec.memory_step)
            state = ShardedState((*state, *held))
    return state


def load_local_checkpoint(
    name: str, state: ShardedState, source_state: ShardedState, context: ParallelContext, peer_info: PeerInfo
) -> None:
    """Fill the state from files on the nodes of all ranks. Collective.

    A rank reads what its own node has, and receives the rest. Raises CheckpointError as `load_checkpoint` does.
    """
    checkpoint_index = merge_indexes(peer_info.source_indexes)
    names = _select_stored(checkpoint_index, peer_info.destination_indexes, f"local checkpoint {name}")
    destinations = [index.select(name for name in index if name in names) for index in peer_info.destination_indexes]
    destination = ShardedState(shard for shard in state if shard.name in names)
    indexes = (peer_info.source_indexes, destinations)
    reshard_state(destination, source_state, context.world_group, context.device, indexes)


def load_checkpoint(checkpoint: Checkpoint, state: ShardedState, indexes: list[StateIndex]) -> None:
    """Fill the state from a checkpoint. Raises CheckpointError unless it has exactly the tensors of this model.

    Recent losses and the state of callbacks may be missing on either side, since `fault.loss_spike_deviations` and the
    callbacks of a run may change; so may what earlier versions did not save.
    """
    names = _select_stored(checkpoint.index, indexes, str(checkpoint.path))
    read_state(checkpoint, ShardedState(shard for shard in state if shard.name in names))


def _select_stored(stored: StateIndex, indexes: list[StateIndex], checkpoint_name: str) -> set[str]:
    """Return the names of the tensors to load. Raises CheckpointError unless the stored ones are those of this model.

    `indexes`: the state that each rank needs.
    """
    index = merge_indexes(indexes)
    stored_part, index_part = (some.select(name for name in some if not _is_optional(name)) for some in (stored, index))
    if difference := find_difference(stored_part, index_part):
        raise CheckpointError(f"{checkpoint_name} is of another model: {difference}; choose another run.dir")
    return {name for name in index if not _is_optional(name) or name in stored}


def _is_optional(name: str) -> bool:
    return name in (RECENT_LOSSES, NUM_UPDATES, GENERATORS) or name.startswith(CALLBACK_PREFIX)


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
