"""Exchange of the weights with tensors of a callback, such as their averages, for the time of an evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from raytrain_hpc.callbacks.callback import ParameterState, TrainingContext
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.callback_state import CallbackState
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.snapshot_manager import SnapshotManager

_WEIGHTS = "model"


@dataclass
class WeightExchange:
    """Exchange of the contents of weights and a ParameterState. Called twice, it restores both.

    Where the live state serves as a snapshot, it is published with the names exchanged too, so that a fault in between
    finds every tensor under its name.
    """

    context: TrainingContext
    model: ParallelModel
    state: ShardedState
    callback_state: CallbackState
    snapshots: SnapshotManager
    checkpointer: Checkpointer

    def __post_init__(self) -> None:
        self._exchanged: ParameterState | None = None

    def undo(self) -> None:
        """Exchange back if a callback has left the weights exchanged. Call after an evaluation."""
        if self._exchanged is not None:
            self(self._exchanged)

    @torch.no_grad()
    def __call__(self, tensors: ParameterState) -> None:
        """Exchange. Raises CallbackError if `tensors` is not part of the state of a callback."""
        kind = self.callback_state.find_kind(tensors)
        exchanged_kind = None if self._exchanged is None else self.callback_state.find_kind(self._exchanged)
        if exchanged_kind not in (None, kind):
            raise CallbackError(f"exchange_weights: the weights are exchanged with {exchanged_kind} already")
        self.snapshots.wait_for_copies()
        self.checkpointer.wait_for_staging()
        is_published = self.snapshots.is_live_published
        self.snapshots.before_update()
        self.model.gradient_sync.free_gathered_weights()
        for name, tensor in tensors.items():
            weight = self.context.parameters[name]
            previous = weight.clone()
            weight.copy_(tensor)
            tensor.copy_(previous)
        self._exchanged = tensors if self._exchanged is None else None
        if is_published:
            live_state = self.state if self._exchanged is None else _exchange_names(self.state, kind)
            self.snapshots.publish_live(self.context.step, live_state)


def _exchange_names(state: ShardedState, kind: str) -> ShardedState:
    """Return the state in which the shards of the weights and those of `kind` have each other's names."""
    exchanged = []
    callback_prefix, weight_prefix = f"{kind}.", f"{_WEIGHTS}."
    stored = {shard.name for shard in state}
    for shard in state:
        name = shard.name
        if name.startswith(callback_prefix):
            name = weight_prefix + name.removeprefix(callback_prefix)
        elif name.startswith(weight_prefix) and callback_prefix + name.removeprefix(weight_prefix) in stored:
            name = callback_prefix + name.removeprefix(weight_prefix)
        exchanged.append(replace(shard, name=name))
    return ShardedState(exchanged)
