"""`bench snapshots`: what a snapshot of a GPU's whole state after every step costs the steps."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from raytrain_hpc.bench.local_trainer import one_worker, the_gpu
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import COMMON
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.training.snapshot_manager import Keeper
from raytrain_hpc.training.trainer import Trainer

WORDS = (
    *COMMON,
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
BLOCK = 5  # steps of a way before the next way's turn; the first two of them are not counted
MODES = ("none", "behind", "waited for")


def run(rounds: int) -> Table:
    """The three ways in turn, twice a round. Raises ClusterError where there is no GPU."""
    device, turns = the_gpu("snapshots"), 2 * rounds
    steps = BLOCK * len(MODES) * (turns + 1)
    return measure(load_config(None, [*WORDS, f"train.steps={steps}"]), device)


def measure(config: Config, device: torch.device) -> Table:
    """The same for any settings of one worker, on any device; in the first turn code is compiled."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    with one_worker(config, device) as trainer:
        keeper = replace(trainer.keeper, memory=Snapshots(), lends=False)
        for block in range(config.train.steps // BLOCK):
            mode = MODES[block % len(MODES)]
            of_block = _block(trainer, keeper, mode, range(block * BLOCK, (block + 1) * BLOCK))
            if block >= len(MODES):
                seconds[mode] += of_block[2:]
        gib = sum(held.tensor.numel() * held.tensor.element_size() for held in keeper.holding) / 2**30
    table = Table(
        "bench snapshots: the state copied to host memory after every step", ("snapshots", "step s", "more ms")
    )
    for mode in MODES:
        table.add(mode, median(seconds[mode]), 1e3 * (median(seconds[mode]) - median(seconds["none"])))
    table.notes += [
        f"{gib:.1f} GiB of weights and moments; {len(seconds['none'])} steps a way, in turns of {BLOCK} of which the "
        "first two are not counted; behind: as a run does it, the copy going on while the next step computes",
        torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    ]
    return table


def _block(trainer: Trainer, keeper: Keeper, mode: str, steps: range) -> list[float]:
    """Seconds of each step."""
    trainer.keeper = replace(keeper, memory=None if mode == "none" else keeper.memory)
    seconds = []
    for step in steps:
        began = time.perf_counter()
        trainer.train_step(step)
        trainer.keeper.stepped(step + 1)
        if mode == "waited for" and keeper.memory is not None:
            keeper.memory.arrive()
        seconds.append(time.perf_counter() - began)
    if keeper.memory is not None:
        keeper.memory.arrive()
    return seconds
