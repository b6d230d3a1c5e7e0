"""Whose loop a rank runs: the platform's own, or that of a user's script."""

from __future__ import annotations

from typing import Protocol

import torch

from raytrain_hpc.data.loader.block_stream import Blocks
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.runtime.control_channel import Control
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.training.builder import build_trainer, set_kernels
from raytrain_hpc.training.script_trainer import ScriptTrainer
from raytrain_hpc.training.trainer import Outcome


class Runner(Protocol):
    """One rank of a generation, put together."""

    def run(self, first: int, steps_to: int) -> Outcome:
        """Train from `first` committed steps to `steps_to`, unless stopped or paused before."""


def runner_of(
    spec: WorkerSpec,
    rank: int,
    device: torch.device,
    meeting: Rendezvous | None,
    control: Control,
    blocks: Blocks | None = None,
    memory: Snapshots | None = None,
) -> Runner:
    """As `build.build_trainer`, whatever is trained."""
    if isinstance(spec.custom, Script):
        set_kernels(spec.config, device)
        return ScriptTrainer(spec, rank, device, meeting, control, memory)
    return build_trainer(spec, rank, device, meeting, control, blocks, memory)
