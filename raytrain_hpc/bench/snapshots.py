"""`bench snapshots`: what a snapshot of a GPU's whole state after every step costs the steps."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import torch

from raytrain_hpc.bench.cases import COMMON
from raytrain_hpc.bench.table import Table
from raytrain_hpc.checkpoint.snapshot import Snapshots
from raytrain_hpc.config import Config
from raytrain_hpc.config_files import load_config
from raytrain_hpc.driver.preparation import prepare_run
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.worker.build import build_trainer
from raytrain_hpc.worker.control import Control
from raytrain_hpc.worker.keeping import Keeper
from raytrain_hpc.worker.loop import Trainer
from raytrain_hpc.worker.spec import WorkerSpec

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
    """The three ways in turn, four times a round. Raises ClusterError where there is no GPU."""
    if not torch.cuda.is_available():
        raise ClusterError("bench snapshots: this machine has no usable GPU; run it where there is one")
    return measure(load_config(None, list(WORDS)), torch.device("cuda", 0), 4 * rounds)


def measure(config: Config, device: torch.device, turns: int) -> Table:
    """The same on any device and for any settings of one worker."""
    trainer = _trainer(config, device)
    memory = Snapshots()
    keeper = replace(trainer.keeper, memory=memory, lends=False)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    steps = BLOCK * len(MODES) * (turns + 1)
    with trainer.feed.reading(0, steps):
        for block in range(steps // BLOCK):
            mode = MODES[block % len(MODES)]
            of_block = _block(trainer, keeper, mode, range(block * BLOCK, (block + 1) * BLOCK))
            if block >= len(MODES):  # in the first turn memory is allocated, and code compiled
                seconds[mode] += of_block[2:]
    gib = sum(held.tensor.numel() * held.tensor.element_size() for held in trainer.keeper.holding) / 2**30
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


def _trainer(config: Config, device: torch.device) -> Trainer:
    prepared = prepare_run(config, None, lambda line: None)
    layout, batching = prepared.layout(1)
    spec = WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        shape=prepared.shape,
        custom=None,
        generation=1,
        resume_step=None,
        steps_to=config.train.steps,
    )
    return build_trainer(spec, 0, device, None, Control())


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
