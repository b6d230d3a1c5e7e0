"""`bench snapshots`: overhead of an in-memory snapshot of a GPU's full training state after every step."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from raytrain_hpc.bench.local_trainer import open_trainer, require_gpu
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import COMMON_OVERRIDES
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.torch_device import get_device_name
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.trainer import Trainer

OVERRIDES = (
    *COMMON_OVERRIDES,
    "data.path=synthetic",
    "cluster.workers=0",
    "cluster.device=cuda",
    "model.preset=llama3_1b",
    "train.seq_len=4096",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "train.dtype=bf16",
    "train.compile=true",
    "parallel.activation_checkpointing=full",
)
STEPS_PER_BLOCK = 5  # consecutive steps per mode; the first two of a block are not measured
MODES = ("none", "overlapped", "blocking")


def run(rounds: int) -> Table:
    """Alternate the three modes, twice per round.

    Raises:
        ClusterError: This machine has no usable GPU.
    """
    device, turns = require_gpu("snapshots"), 2 * rounds
    steps = STEPS_PER_BLOCK * len(MODES) * (turns + 1)
    return measure_snapshots(load_config(None, [*OVERRIDES, f"train.steps={steps}"]), device)


def measure_snapshots(config: Config, device: torch.device) -> Table:
    """Measure the three modes with any config of one worker, on any device. The first block of each mode is warm-up."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with open_trainer(config, device) as trainer:
        snapshots = replace(trainer.snapshots, store=SnapshotStore(), live_state_suffices=False)
        for block in range(config.train.steps // STEPS_PER_BLOCK):
            mode = MODES[block % len(MODES)]
            block_seconds = _run_block(
                trainer, snapshots, mode, range(block * STEPS_PER_BLOCK, (block + 1) * STEPS_PER_BLOCK)
            )
            if block >= len(MODES):
                seconds[mode] += block_seconds[2:]
        gib = sum(shard.tensor.numel() * shard.tensor.element_size() for shard in snapshots.live_state) / 2**30
    table = Table(
        "bench snapshots: the state copied to host memory after every step", ("snapshots", "step s", "additional ms")
    )
    for mode in MODES:
        table.add_row(mode, median(seconds[mode]), 1e3 * (median(seconds[mode]) - median(seconds["none"])))
    table.notes += [
        f"{gib:.1f} GiB of weights and moments; {len(seconds['none'])} steps per mode, in blocks of {STEPS_PER_BLOCK}, "
        "of which the first two are not measured; overlapped: as in a run, the copy overlaps with the next step; "
        "blocking: each step waits for its copy",
        get_device_name(device),
    ]
    return table


def _run_block(trainer: Trainer, snapshots: SnapshotManager, mode: str, steps: range) -> list[float]:
    """Run a block of steps in one mode and return the seconds of each step."""
    trainer.snapshots = replace(snapshots, store=None if mode == "none" else snapshots.store)
    seconds = []
    for step in steps:
        start = time.perf_counter()
        trainer.train_step(step)
        trainer.snapshots.after_step(step + 1)
        if mode == "blocking" and snapshots.store is not None:
            snapshots.store.synchronize()
        seconds.append(time.perf_counter() - start)
    if snapshots.store is not None:
        snapshots.store.synchronize()
    return seconds
