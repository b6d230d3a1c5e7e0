"""Going on from memory in the same processes: other ranks, lost parts, newcomers. And nothing stays of what is over."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.elastic.state_partition import compute_state_partition, plan_replication_pairs
from raytrain_hpc.planner.placement import Site
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_memory import SharedMemoryHandle
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

WORDS = ["train.steps=6", "train.micro_batch=2", "train.deterministic=elastic", "model.dropout=0.1"]
LAYOUTS = {"replicas": ["parallel.zero=0"], "zero-1": ["parallel.zero=1"], "zero-3": ["parallel.zero=3"]}


def life(number: int, meeting: Any, specs: Sequence[Any], ranks: Sequence[int], newcomers: Sequence[int]) -> Any:
    """Process `number` as rank ranks[number]; a newcomer holds nothing. Returns (rank, steps, copies, records)."""
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.snapshot.memory_store import SnapshotStore
    from raytrain_hpc.training.builder import build_trainer

    kept = sys.modules.setdefault("kept_from_life_to_life", types.ModuleType("kept"))
    if number in newcomers:
        kept.memory = SnapshotStore()
    rank, control, spec = ranks[number], ControlChannel(), specs[0]
    trainer = build_trainer(spec, rank, torch.device("cpu"), meeting, control, None, kept.memory)
    trainer.run(spec.first, spec.end_step)
    kept.memory.copy_live()
    kept.memory.revoke_live()
    return rank, kept.memory.steps, kept.memory.replica_steps, control.drain()


@pytest.mark.parametrize(
    ("layout", "sent"), [("replicas", False), ("zero-1", True), ("zero-3", True), ("zero-3", False)]
)
def test_the_same_processes_as_other_ranks_and_one_that_is_new(pool: WarmPool, layout: str, sent: bool) -> None:
    """Bit for bit the run that was never interrupted, though process 1 has lost what it held.

    What it held is with another rank: sent there as to another node, or in memory that both have open.
    """
    words = [*WORDS, *LAYOUTS[layout], "cluster.workers=3"]
    undisturbed = [
        metrics["train/loss"] for metrics in get_step_metrics(pool.train(make_small_config(None, *words))[0])
    ]
    first = make_worker_spec(make_small_config(None, *words), 3, steps_to=3)
    first = replace(
        first, replication_pairs=plan_replication_pairs(first.layout, [Site("", "a")] * 3), is_single_node=not sent
    )
    before = {rank: (steps, copies) for rank, steps, copies, _ in pool.call(life, 3, [first], (0, 1, 2), (0, 1, 2))}
    number = compute_state_partition(first.layout)
    left = {number[rank] for rank in (0, 2)} | {number[one] for rank in (0, 2) for one in before[rank][1]}
    assert left == set(number), "what rank 1 held is held by another one, too"
    assert all(3 in before[rank][0] for rank in (0, 2))
    second = replace(first, resume_step=None, memory_step=3, end_step=6)
    after = pool.call(life, 3, [second], (2, 0, 1), (1,))
    (records,) = [records for rank, _, _, records in after if rank == 0]
    assert [metrics["train/loss"] for metrics in get_step_metrics(records)] == undisturbed[3:]


def test_a_buddy_that_cannot_open_what_it_should_says_so() -> None:
    spec = replace(
        make_worker_spec(make_small_config(None, "parallel.zero=3"), 2, steps_to=3),
        replication_pairs=((0, 1), (1, 0)),
        is_single_node=True,
    )
    one, other = (SnapshotPeers(spec, rank, SnapshotStore(), torch.device("cpu")) for rank in (0, 1))
    elsewhere = [SharedMemoryHandle("/proc/0/fd/5", openings.link_target) for openings in one.handles]
    notes: list[str] = []
    told = PeerInfo([StateIndex(), StateIndex()], [], [elsewhere, other.handles], {})
    assert other.attach_snapshots(told, notes.append) == {} and list(one.attach_snapshots(told, notes.append)) == [1]
    assert len(notes) == 1 and notes[0].startswith("rank 1 cannot open the snapshots of rank 0, though they are on one")


def groups_alive(rank: int, meeting: Any) -> int:
    """Threads of gloo groups in this process."""
    return sum((thread / "comm").read_text().strip() == "gloo_tcp_loop" for thread in Path("/proc/self/task").iterdir())


@pytest.mark.parametrize("layout", ["parallel.dp_replicate=2", "parallel.cp=2", "parallel.tp=2", "parallel.zero=3"])
def test_no_group_outlives_its_generation(pool: WarmPool, layout: str) -> None:
    """One that did would keep its threads busy, and whoever waits for this rank waiting."""
    counts = []
    for _ in range(3):
        pool.train(make_small_config(None, "train.steps=2", "cluster.workers=2", layout))
        counts.append(pool.call(groups_alive, 2))
    assert counts == [[0, 0]] * 3


def recalled_and_emitted(rank: int, meeting: Any, spec: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, then return (metrics that this rank remembers, metrics that it has reported)."""
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    build_trainer(spec, rank, torch.device("cpu"), meeting, control).run(spec.first, spec.end_step)
    return control.recall_metrics(0), get_step_metrics(control.drain())


def test_every_rank_remembers_the_evaluations_that_rank_0_reports(pool: WarmPool) -> None:
    """If rank 0 is lost before the driver has fetched its records, another rank supplies them, evaluations included."""
    config = make_small_config(None, "cluster.workers=2", "train.steps=4", "train.eval_every=2", "train.micro_batch=2")
    (_, reported), (remembered, _) = pool.call(recalled_and_emitted, 2, make_worker_spec(config, 2, steps_to=4))
    evaluations = [(metrics["step"], metrics["val/loss"]) for metrics in reported if "val/loss" in metrics]
    assert [step for step, _ in evaluations] == [2, 4]
    assert [(metrics["step"], metrics["val/loss"]) for metrics in remembered if "val/loss" in metrics] == evaluations
