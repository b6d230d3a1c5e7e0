"""Recovery from memory in the same processes: changed ranks, lost state, new workers, and freed process groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.elastic.state_partition import compute_state_partition, plan_replication_pairs
from raytrain_hpc.planner.placement import Site
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_file import SharedMemoryHandle
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.training.snapshot_peers import SnapshotPeers
from tests.training.generations import run_generation
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

OVERRIDES = ["train.steps=6", "train.micro_batch_size=2", "train.deterministic=elastic", "model.dropout=0.1"]
LAYOUTS = {"replicas": ["parallel.zero=0"], "zero-1": ["parallel.zero=1"], "zero-3": ["parallel.zero=3"]}


@pytest.mark.parametrize(
    ("layout", "sent"), [("replicas", False), ("zero-1", True), ("zero-3", True), ("zero-3", False)]
)
def test_recovery_with_changed_ranks_and_a_new_worker_keeps_the_losses(pool: WarmPool, layout: str, sent: bool) -> None:
    """The losses are bit for bit those of an uninterrupted run, although process 1 has lost its state.

    Another rank has a replica of it: sent as to another node, or in shared memory.
    """
    overrides = [*OVERRIDES, *LAYOUTS[layout], "cluster.workers=3"]
    undisturbed = [
        metrics["train/loss"] for metrics in get_step_metrics(pool.train(make_small_config(None, *overrides))[0])
    ]
    first = make_worker_spec(make_small_config(None, *overrides), 3, steps_to=3)
    replication_pairs = plan_replication_pairs(first.layout, [Site("", "a")] * 3)
    first = replace(first, replication_pairs=replication_pairs, max_ranks_per_node=1 if sent else 3)
    snapshots = {
        rank: (steps, replicas)
        for rank, steps, replicas, _ in pool.call(run_generation, 3, [first], (0, 1, 2), (0, 1, 2))
    }
    partition = compute_state_partition(first.layout)
    recoverable = {partition[rank] for rank in (0, 2)} | {
        partition[replica_rank] for rank in (0, 2) for replica_rank in snapshots[rank][1]
    }
    assert recoverable == set(partition), "another rank has a replica of the state of rank 1"
    assert all(3 in snapshots[rank][0] for rank in (0, 2))
    second = replace(first, resume_step=None, memory_step=3, end_step=6)
    results = pool.call(run_generation, 3, [second], (2, 0, 1), (1,))
    (records,) = [records for rank, _, _, records in results if rank == 0]
    assert [metrics["train/loss"] for metrics in get_step_metrics(records)] == undisturbed[3:]


def test_a_generation_of_no_steps_saves_the_state_in_memory(pool: WarmPool, tmp_path: Path) -> None:
    """After a stop between generations, on other ranks: the same files as those of a run that ended at that step."""
    config = make_small_config(tmp_path, *OVERRIDES, "parallel.zero=1", "checkpoint.interval=0")
    first = make_worker_spec(config, 3, steps_to=3)
    ended = pool.call(run_generation, 3, [first], (0, 1, 2), (0, 1, 2))
    saving = replace(first, memory_step=3, end_step=3, generation=first.generation + 1, has_pending_checkpoint=True)
    saved = pool.call(run_generation, 3, [saving], (2, 0, 1), ())

    def read_shards(results: Any) -> dict[str, str]:
        reports = [record for *_, records in results for record in records if record["type"] == "shard"]
        assert [report["step"] for report in reports] == [3, 3, 3] and all(r["seconds"] > 0 for r in reports)
        return {report["shard"]["file"]: report["shard"]["checksum"]["digest"] for report in reports}

    assert len(read_shards(ended)) == 3 and read_shards(saved) == read_shards(ended)
    assert not get_step_metrics([record for *_, records in saved for record in records])


def test_peer_that_cannot_open_shared_memory_logs_it() -> None:
    spec = replace(
        make_worker_spec(make_small_config(None, "parallel.zero=3"), 2, steps_to=3),
        replication_pairs=((0, 1), (1, 0)),
        max_ranks_per_node=2,
    )
    first, second = (SnapshotPeers(spec, rank, SnapshotStore(), torch.device("cpu"), StateIndex()) for rank in (0, 1))
    assert first.handles is not None
    slots = tuple(SharedMemoryHandle("/proc/0/fd/5", slot.link_target) for slot in first.handles.slots)
    missing = first.handles._replace(slots=slots)
    messages: list[str] = []
    peer_info = PeerInfo([StateIndex(), StateIndex()], [], [missing, second.handles], {})
    assert second.attach_snapshots(peer_info, messages.append) == {} and list(
        first.attach_snapshots(peer_info, messages.append)
    ) == [1]
    assert len(messages) == 1 and messages[0].startswith("rank 1 cannot open the snapshots of rank 0 on the same node")


def count_group_threads(rank: int, rendezvous: Any) -> int:
    """Return the number of gloo process-group threads in this process."""
    return sum((thread / "comm").read_text().strip() == "gloo_tcp_loop" for thread in Path("/proc/self/task").iterdir())


@pytest.mark.parametrize("layout", ["parallel.dp_replicate=2", "parallel.cp=2", "parallel.tp=2", "parallel.zero=3"])
def test_no_process_group_outlives_its_generation(pool: WarmPool, layout: str) -> None:
    """A leaked group would keep its threads busy, and block peers that wait for this rank."""
    counts = []
    for _ in range(3):
        pool.train(make_small_config(None, "train.steps=2", "cluster.workers=2", layout))
        counts.append(pool.call(count_group_threads, 2))
    assert counts == [[0, 0]] * 3


def train_and_recall(rank: int, rendezvous: Any, spec: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train, and return (metrics that this rank remembers, metrics that it reported)."""
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    build_trainer(spec, rank, torch.device("cpu"), rendezvous, control).run(spec.start_step, spec.end_step)
    return control.recall_metrics(0), get_step_metrics(control.drain())


def test_every_rank_remembers_the_evaluations_that_rank_0_reports(pool: WarmPool) -> None:
    """If rank 0 is lost before the driver has fetched its records, another rank supplies them, evaluations included."""
    config = make_small_config(
        None, "cluster.workers=2", "train.steps=4", "eval.interval=2", "train.micro_batch_size=2"
    )
    (_, reported), (remembered, _) = pool.call(train_and_recall, 2, make_worker_spec(config, 2, steps_to=4))
    evaluations = [(metrics["step"], metrics["val/loss"]) for metrics in reported if "val/loss" in metrics]
    assert [step for step, _ in evaluations] == [2, 4]
    assert [(metrics["step"], metrics["val/loss"]) for metrics in remembered if "val/loss" in metrics] == evaluations
