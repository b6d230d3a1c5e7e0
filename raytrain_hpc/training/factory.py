"""Factory for the trainer of a rank: the training loop of this project, or one that runs a user's script."""

from __future__ import annotations

from typing import Protocol

import torch

from raytrain_hpc.data.loader.block_stream import BlockSource
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.training.builder import build_trainer, configure_torch
from raytrain_hpc.training.script_trainer import ScriptTrainer
from raytrain_hpc.training.step_completion import TrainOutcome


class RankTrainer(Protocol):
    """A rank of a generation, ready to train."""

    def run(self, start_step: int, end_step: int) -> TrainOutcome:
        """Train from `start_step` to `end_step` committed steps, unless stopped or paused earlier."""


def build_rank_trainer(
    spec: WorkerSpec,
    rank: int,
    device: torch.device,
    rendezvous: Rendezvous | None,
    control: ControlChannel,
    block_source: BlockSource | None = None,
    snapshot_store: SnapshotStore | None = None,
) -> RankTrainer:
    """Build the trainer for `spec.custom`: a script, a custom model or the decoder. See `builder.build_trainer`."""
    if isinstance(spec.custom, Script):
        configure_torch(spec.config, device)
        return ScriptTrainer(spec, rank, device, rendezvous, control, snapshot_store)
    return build_trainer(spec, rank, device, rendezvous, control, block_source, snapshot_store)
