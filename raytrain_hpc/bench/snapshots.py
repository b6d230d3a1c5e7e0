"""`bench snapshots`: what a snapshot of a GPU's whole state after every step costs the steps."""

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
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.trainer import Trainer

OVERRIDES = (
    *COMMON_OVERRIDES,
    "data.path=synthetic",
    "cluster.workers=0",
    "cluster.device=cuda",
    "model.preset=llama3_1b",
    "train.seq_len=4096",
    "train.global_batch=8",
    "train.micro_batch=4",
    "train.dtype=bf16",
    "train.compile=true",
    "parallel.recompute=full",
)
STEPS_PER_BLOCK = 5  # steps of a way before the next way's turn; the first two of them are not counted
MODES = ("none", "behind", "waited for")


def run(rounds: int) -> Table:
    """The three ways in turn, twice a round. Raises ClusterError where there is no GPU."""
    device, turns = require_gpu("snapshots"), 2 * rounds
    steps = STEPS_PER_BLOCK * len(MODES) * (turns + 1)
    return measure_snapshots(load_config(None, [*OVERRIDES, f"train.steps={steps}"]), device)


def measure_snapshots(config: Config, device: torch.device) -> Table:
    """The same for any settings of one worker, on any device; in the first turn code is compiled."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with open_trainer(config, device) as trainer:
        keeper = replace(trainer.snapshots, store=SnapshotStore(), live_state_suffices=False)
        for block in range(config.train.steps // STEPS_PER_BLOCK):
            mode = MODES[block % len(MODES)]
            of_block = _run_block(trainer, keeper, mode, range(block * STEPS_PER_BLOCK, (block + 1) * STEPS_PER_BLOCK))
            if block >= len(MODES):
                seconds[mode] += of_block[2:]
        gib = sum(held.tensor.numel() * held.tensor.element_size() for held in keeper.state) / 2**30
    table = Table(
        "bench snapshots: the state copied to host memory after every step", ("snapshots", "step s", "more ms")
    )
    for mode in MODES:
        table.add_row(mode, median(seconds[mode]), 1e3 * (median(seconds[mode]) - median(seconds["none"])))
    table.notes += [
        f"{gib:.1f} GiB of weights and moments; {len(seconds['none'])} steps a way, in turns of {STEPS_PER_BLOCK} of which the "
        "first two are not counted; behind: as a run does it, the copy going on while the next step computes",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    ]
    return table


def _run_block(trainer: Trainer, keeper: SnapshotManager, mode: str, steps: range) -> list[float]:
    """Seconds of each step."""
    trainer.snapshots = replace(keeper, store=None if mode == "none" else keeper.store)
    seconds = []
    for step in steps:
        began = time.perf_counter()
        trainer.train_step(step)
        trainer.snapshots.after_step(step + 1)
        if mode == "waited for" and keeper.store is not None:
            keeper.store.synchronize()
        seconds.append(time.perf_counter() - began)
    if keeper.store is not None:
        keeper.store.synchronize()
    return seconds
