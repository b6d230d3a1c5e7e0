"""Generations of one run in the processes of a pool, which keep the snapshots of its state in between."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec


def run_generation(
    number: int, rendezvous: Any, specs: Sequence[Any], ranks: Sequence[int], newcomers: Sequence[int]
) -> Any:
    """Train one generation in process `number`; `newcomers` have no state. Return (rank, steps, replicas, records)."""
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.snapshot.memory_store import SnapshotStore
    from raytrain_hpc.training.builder import build_trainer

    process_state = sys.modules.setdefault("state_kept_between_generations", types.ModuleType("process_state"))
    if number in newcomers:
        process_state.memory = SnapshotStore()
    rank, control, spec = ranks[number], ControlChannel(), specs[0]
    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, control, None, process_state.memory)
    trainer.run(spec.start_step, spec.end_step)
    process_state.memory.copy_live()
    process_state.memory.revoke_live()
    return rank, process_state.memory.steps, process_state.memory.replica_steps, control.drain()


def train_with_changed_ranks(pool: WarmPool, directory: Path, *words: str) -> tuple[list[float], list[float]]:
    """Train six steps on three ranks of ZeRO-1, in the second half with other ranks, which get their state from memory.

    Return the losses, and those of an undisturbed run.
    """
    base = ["train.steps=6", "train.micro_batch_size=2", "train.deterministic=elastic", "parallel.zero=1"]
    config = make_small_config(directory, *base, *words, "cluster.workers=3")
    undisturbed = pool.train(make_small_config(None, *base, *words, "cluster.workers=3"))[0]
    first = make_worker_spec(config, 3, steps_to=3)
    second = replace(first, memory_step=3, end_step=6, generation=first.generation + 1)
    results = [
        *pool.call(run_generation, 3, [first], (0, 1, 2), (0, 1, 2)),
        *pool.call(run_generation, 3, [second], (2, 0, 1), ()),
    ]
    records = [record for rank, _, _, records in results if rank == 0 for record in records]
    losses, expected = ([step["train/loss"] for step in get_step_metrics(lines)] for lines in (records, undisturbed))
    return losses, expected


def run_until_fault(rank: int, rendezvous: Any, spec: Any, fails_after_agreement: Sequence[int] = ()) -> Any:
    """Train until a rank fails, in a process that keeps its state. Return the steps in memory.

    `fails_after_agreement`: ranks that fail when ranks have agreed on requests of callbacks after step 3.
    """
    from raytrain_hpc.distributed.process_groups import destroy_process_groups
    from raytrain_hpc.snapshot.memory_store import SnapshotStore

    process_state = sys.modules.setdefault("state_kept_between_generations", types.ModuleType("process_state"))
    process_state.memory = SnapshotStore()
    with contextlib.suppress(RuntimeError):  # whose traceback keeps the groups alive, for which other ranks wait
        _train_until_fault(rank, rendezvous, spec, process_state.memory, rank in fails_after_agreement)
    destroy_process_groups()
    process_state.memory.copy_live()
    return process_state.memory.steps


def _train_until_fault(rank: int, rendezvous: Any, spec: Any, memory: Any, fails_after_agreement: bool) -> None:
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel(), None, memory)
    callbacks = trainer.callbacks
    agree_requests = callbacks.agree_requests

    def agree_and_fail(**arguments: Any) -> Any:
        requests = agree_requests(**arguments)
        if callbacks.context.step == 3 and fails_after_agreement:
            raise RuntimeError("Connection closed by peer")
        return requests

    callbacks.agree_requests = agree_and_fail  # type: ignore[method-assign]
    trainer.run(spec.start_step, spec.end_step)
