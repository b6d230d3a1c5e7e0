"""Fills a rank's state: with what ranks hold in memory, from a checkpoint, and from an earlier one in mid-run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.checkpoint.manifest import Checkpoint, read_manifest
from raytrain_hpc.checkpoint.merge_lora import read_merged
from raytrain_hpc.checkpoint.shard_io import read_pieces
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.distributed.handshake import Told
from raytrain_hpc.distributed.process_groups import Place
from raytrain_hpc.errors import CheckpointError, RunFailed
from raytrain_hpc.model.lora import MARK
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.reshard import fill
from raytrain_hpc.state.shard_index import StateIndex, compare, merge
from raytrain_hpc.state.sharded_state import Holding

LOSSES = "losses"  # the recent ones: state only where spikes are looked for
_BALANCE = ".router.bias"  # of experts, where that is how they are balanced
_PUBLISHED_S = 30.0  # until a checkpoint that all ranks have written is there
_LOOK_S = 0.01


def restore(
    spec: WorkerSpec,
    place: Place,
    holding: Holding,
    offered: Holding,
    told: Told,
    store: CheckpointStore,
) -> None:
    """Fill the state from what is offered of memory, from a checkpoint, or not at all; or weights from another run."""
    if spec.memory_step is not None:
        fill(holding, offered, place.world_group, place.device, (told.offers, told.holdings))
    elif spec.resume_step is not None:
        load(read_manifest(store.path(spec.resume_step)), holding, told.holdings)
    elif spec.initial is not None:
        load_weights(read_manifest(spec.initial), holding, told.holdings)


def load(checkpoint: Checkpoint, holding: Holding, indexes: list[StateIndex]) -> None:
    """Fill the state, having made sure that the checkpoint holds this model's tensors: no more and no fewer.

    Recent losses need not be there, and are not looked at where nobody asks for them: that setting may change.
    """
    model, mine = (index.only(set(index) - {LOSSES}) for index in (checkpoint.index, merge(indexes)))
    if difference := compare(model, mine):
        raise CheckpointError(f"{checkpoint.path} is of another model: {difference} there; choose another run.dir")
    known = LOSSES in checkpoint.index
    read_pieces(checkpoint, Holding(held for held in holding if known or held.name != LOSSES))


def load_weights(checkpoint: Checkpoint, holding: Holding, indexes: list[StateIndex]) -> None:
    """Fill the model alone, from a checkpoint that holds the same one, whatever else it holds; adapters are added."""
    there, mine = (
        index.only(name for name in index if _of_model(name)) for index in (checkpoint.index, merge(indexes))
    )
    # The balancing of experts may be another one than there: what only one of the two has begins anew.
    known = {name for name in (*there, *mine) if not name.endswith(_BALANCE) or (name in there and name in mine)}
    there, mine = there.only(known), mine.only(known)
    if difference := compare(there, mine):
        raise CheckpointError(f"run.init_from: {checkpoint.path} is of another model: {difference} there")
    read_merged(checkpoint, Holding(held for held in holding if held.name in known))


def _of_model(name: str) -> bool:
    """Whether it is part of a model that another run can have, too: adapters begin anew."""
    return name.startswith("model.") and MARK not in name


@dataclass
class GoingBack:
    """Makes the state that of the newest checkpoint again, on all ranks alike, in the middle of a run."""

    store: CheckpointStore
    every: int  # steps between checkpoints
    place: Place
    holding: Holding
    indexes: list[StateIndex]
    written: Callable[[], object]  # waits until this rank's part of the last checkpoint is written
    rest: Callable[[], None]  # called when moments were filled

    def __call__(self, step: int) -> int:
        """Collective, after `step` committed steps. Returns the step whose state is now live.

        Raises RunFailed, on every rank, where there is no valid checkpoint.
        """
        self.written()
        chosen = torch.tensor([self._newest(step) if self.place.rank == 0 else 0], device=self.place.device)
        if self.place.world_group is not None:
            dist.broadcast(chosen, 0)
        if chosen < 0:
            raise RunFailed(
                f"step {step + 1}: fault.on_nan=rollback, but there is no checkpoint to go back to; set "
                "checkpoint.every, or use fault.on_nan=skip"
            )
        load(read_manifest(self.store.path(int(chosen))), self.holding, self.indexes)
        self.rest()
        return int(chosen)

    def _newest(self, step: int) -> int:
        """Of the one that is due by now, if it comes: which one is gone back to must not depend on a disk's speed."""
        due, until = step // self.every * self.every if self.every else 0, time.monotonic() + _PUBLISHED_S
        while due and due not in self.store.steps() and time.monotonic() < until:
            time.sleep(_LOOK_S)
        newest = self.store.newest_valid(lambda path, reason: None)
        return -1 if newest is None else newest.step
