"""Publication in the background: order, failures, slow storage, and a lease that is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.driver.checkpoint_publisher import CheckpointPublisher, Publication
from raytrain_hpc.driver.run_setup import find_newest_checkpoint
from raytrain_hpc.errors import CheckpointError, LeaseLostError
from tests.checkpoint.conftest import FakeRanks

RANKS = 2


class Recorder:
    """A publisher for two ranks, and what it has called."""

    def __init__(self, directory: Path, keep: int = 2, fallback_steps: list[int] | None = None) -> None:
        self.store, self.lease = CheckpointStore(directory / "checkpoints"), Lease.acquire(directory, "me")
        self.published: list[Publication] = []
        self.failed: list[tuple[int, str]] = []
        self.alarms: list[str] = []
        self.fallback_steps = fallback_steps or []
        self.may_sync = threading.Event()
        self.may_sync.set()
        self.publisher = CheckpointPublisher(
            self.store,
            self.lease,
            keep,
            lambda step: {"data": step},
            lambda: self.may_sync.wait(20) and None,
            self.published.append,
            lambda step, reason: self.failed.append((step, reason)),
            self.alarms.append,
            lambda: self.fallback_steps,
        )
        self.publisher.begin_generation(1, RANKS)

    def report(
        self, step: int, *, generation: int = 1, error: str = "", shards: Sequence[ShardReport] | None = None
    ) -> None:
        """Write the shards of a step and add the reports of both ranks; rank 1 fails if `error` is given."""
        for rank, report in enumerate(shards or FakeRanks.write(self.store, step, RANKS, generation)):
            result: dict[str, Any] = {"error": error} if error and rank == 1 else {"shard": report.to_json()}
            self.publisher.add_report({"step": step, "rank": rank, "generation": generation, "seconds": 0.5, **result})

    def submit(self, step: int, *, generation: int = 1) -> None:
        """Write a step and let the publisher publish it, as ranks and driver do."""
        self.report(step, generation=generation)
        self.publisher.publish_complete(step)

    def save(self, step: int, *, generation: int = 1) -> None:
        """Write a step, and wait until it is published."""
        self.submit(step, generation=generation)
        self.publisher.wait()


@pytest.fixture
def make_recorder(tmp_path: Path) -> Iterator[Callable[..., Recorder]]:
    recorders = []

    def make(**options: Any) -> Recorder:
        recorders.append(Recorder(tmp_path, **options))
        return recorders[-1]

    yield make
    for recorder in recorders:
        recorder.may_sync.set()
        recorder.publisher.close()


def test_complete_checkpoints_of_committed_steps_are_published_in_order(make_recorder) -> None:
    recorder = make_recorder()
    recorder.report(3)
    recorder.report(5)
    recorder.publisher.publish_complete(4)
    recorder.publisher.wait()
    assert recorder.store.list_steps() == [3] and not recorder.publisher.is_pending(3)
    recorder.publisher.publish_complete(5)
    recorder.publisher.wait()
    assert [publication.step for publication in recorder.published] == [3, 5]
    assert recorder.published[0].write_s == 0.5 and recorder.published[0].publish_s > 0
    assert (
        recorder.store.verify(5).meta == {"data": 5, "verified_step": 0} and not recorder.failed and not recorder.alarms
    )


def test_incomplete_checkpoints_of_an_earlier_generation_are_dropped(make_recorder) -> None:
    recorder = make_recorder()
    recorder.report(3)
    shards = FakeRanks.write(recorder.store, 4, RANKS, 1)
    recorder.publisher.begin_generation(2, RANKS)
    recorder.report(4, generation=1, shards=shards)
    recorder.publisher.publish_complete(9)
    recorder.publisher.wait()
    assert recorder.store.list_steps() == []


def list_staging(recorder: Recorder) -> list[str]:
    return sorted(path.name for path in recorder.store.root.iterdir() if path.name.startswith(".staging"))


def wait_for_staging(recorder: Recorder, expected: list[str]) -> None:
    deadline = time.monotonic() + 20
    while list_staging(recorder) != expected and time.monotonic() < deadline:
        time.sleep(0.005)
    assert list_staging(recorder) == expected


def test_files_of_interrupted_saves_are_deleted_by_the_next_generation(make_recorder) -> None:
    """Four faults during a save: each left up to a whole checkpoint. Complete ones are still published."""
    recorder = make_recorder()
    for generation in range(1, 5):
        recorder.report(10, generation=generation)
        FakeRanks.write(recorder.store, 20, RANKS, generation)  # without reports
        recorder.publisher.publish_complete(10)
        recorder.publisher.begin_generation(generation + 1, RANKS)
        FakeRanks.write(recorder.store, 15, RANKS, generation + 1)
        wait_for_staging(recorder, [f".staging-step-00000015-g{generation + 1}"])
    assert [publication.step for publication in recorder.published] == [10] * 4
    FakeRanks.write(recorder.store, 20, RANKS, 4)  # a rank that was still writing
    recorder.save(25, generation=5)
    wait_for_staging(recorder, [".staging-step-00000015-g5"])
    assert recorder.store.list_steps() == [10, 25] and not recorder.failed and not recorder.alarms


def test_nobody_waits_for_the_deletion_of_unfinished_files(make_recorder, monkeypatch) -> None:
    """A publication comes before the next directory, too."""
    recorder, discard = make_recorder(), CheckpointStore.discard
    is_deleting, may_delete, discarded = threading.Event(), threading.Event(), []

    def discard_slowly(store: CheckpointStore, step: int, generation: int) -> None:
        is_deleting.set()
        assert may_delete.wait(20)
        discarded.append((step, recorder.store.list_steps()))
        discard(store, step, generation)

    monkeypatch.setattr(CheckpointStore, "discard", discard_slowly)
    for step in (3, 5):
        FakeRanks.write(recorder.store, step, RANKS, 1)
    recorder.publisher.begin_generation(2, RANKS)
    assert is_deleting.wait(20)
    recorder.publisher.wait()
    recorder.report(7, generation=2)
    recorder.publisher.publish_complete(7)
    may_delete.set()
    recorder.publisher.wait()
    wait_for_staging(recorder, [])
    assert [steps for _, steps in discarded] == [[], [7]] and {step for step, _ in discarded} == {3, 5}


def test_the_error_of_a_rank_is_reported_and_its_checkpoint_discarded(make_recorder) -> None:
    recorder = make_recorder()
    recorder.report(3, error="disk full")
    recorder.publisher.publish_complete(3)
    recorder.publisher.wait()
    assert recorder.failed == [(3, "rank 1: disk full")] and list(recorder.store.root.iterdir()) == []


def test_while_storage_is_slow_only_the_checkpoints_that_would_be_kept_wait(make_recorder) -> None:
    recorder = make_recorder(keep=2)
    recorder.may_sync.clear()
    recorder.publisher.add_labels(3, ["best"])
    for step in range(1, 8):
        recorder.report(step)
        recorder.publisher.publish_complete(step)
    assert recorder.publisher.is_pending(7)
    recorder.may_sync.set()
    recorder.publisher.wait()
    published = [publication.step for publication in recorder.published]
    assert published in ([1, 3, 6, 7], [3, 6, 7])  # the first may have begun at once
    assert recorder.store.list_steps() == [3, 6, 7] and recorder.store.read_labels() == {"best": 3}
    assert not [path.name for path in recorder.store.root.iterdir() if path.name.startswith(".")]


def test_a_fault_that_the_next_audit_finds_leaves_the_checkpoint_that_the_last_one_verified(make_recorder) -> None:
    """Every 100 steps are audited, every 25 saved. What was saved since step 100 is not trusted after the fault."""
    recorder = make_recorder(keep=3, fallback_steps=[0])
    for step in range(25, 200, 25):
        recorder.fallback_steps = [step // 100 * 100]
        recorder.save(step)
    recorder.store.distrust(100, 1, "rank 1, faulty device")
    newest = find_newest_checkpoint(recorder.store, recorder.alarms.append)
    assert newest is not None and newest.step == 100 and recorder.store.list_steps() == [100, 125, 150, 175]
    recorder.publisher.begin_generation(2, RANKS)
    for step, expected in ((110, [100, 110, 125, 150, 175]), (120, [100, 110, 120])):
        recorder.save(step, generation=2)
        assert recorder.store.list_steps() == expected
    recorder.fallback_steps = [200]
    for step in (200, 210):
        recorder.save(step, generation=2)
    assert recorder.store.list_steps() == [120, 200, 210], "that of the audit before is not needed any more"


def test_a_run_that_starts_over_keeps_its_new_checkpoints(make_recorder) -> None:
    recorder = make_recorder(keep=3, fallback_steps=[0])
    for step in (70, 80, 90):
        recorder.save(step)
    recorder.store.distrust(0, 1, "rank 1, corrupt")
    assert find_newest_checkpoint(recorder.store, recorder.alarms.append) is None
    recorder.publisher.begin_generation(2, RANKS)
    for step, expected in ((10, [10, 70, 80, 90]), (20, [10, 20, 70, 80, 90]), (30, [10, 20, 30])):
        recorder.save(step, generation=2)
        assert recorder.store.list_steps() == expected


def test_a_verified_checkpoint_is_published_however_slow_storage_is(make_recorder) -> None:
    recorder = make_recorder(keep=1)
    recorder.may_sync.clear()
    for step in range(1, 8):
        recorder.fallback_steps = [step // 4 * 4]
        recorder.report(step)
        recorder.publisher.publish_complete(step)
    recorder.may_sync.set()
    recorder.publisher.wait()
    assert recorder.store.list_steps() == [4, 7]


def test_a_label_that_comes_while_old_checkpoints_are_deleted_is_written(make_recorder, monkeypatch) -> None:
    """The next checkpoint, whose publication deletes older ones, is complete by then."""
    recorder, prune = make_recorder(keep=1), CheckpointStore.prune

    def prune_during_request(store: CheckpointStore, *arguments: Any) -> list[Any]:
        if store.list_steps() == [1]:
            recorder.report(2)
            recorder.publisher.publish_complete(2)
            recorder.publisher.add_labels(1, ["best"])
        return prune(store, *arguments)

    monkeypatch.setattr(CheckpointStore, "prune", prune_during_request)
    for step in (1, 3):
        recorder.save(step)
    assert recorder.store.read_labels() == {"best": 1} and recorder.store.list_steps() == [1, 3]


def test_a_checkpoint_that_is_labelled_while_it_waits_is_published(make_recorder) -> None:
    recorder = make_recorder(keep=1)
    recorder.may_sync.clear()
    for step in range(1, 6):
        recorder.submit(step)
    recorder.publisher.add_labels(3, ["best"])
    recorder.may_sync.set()
    recorder.publisher.wait()
    assert recorder.store.read_labels() == {"best": 3} and recorder.store.list_steps() == [3, 5]


def test_a_label_that_cannot_be_written_is_written_before_its_checkpoint_is_deleted(make_recorder, monkeypatch) -> None:
    recorder, set_labels, calls = make_recorder(keep=1), CheckpointStore.set_labels, []

    def fail_twice(store: CheckpointStore, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) < 3:
            raise CheckpointError("the disk is full")
        set_labels(store, *arguments)

    monkeypatch.setattr(CheckpointStore, "set_labels", fail_twice)
    recorder.save(1)
    recorder.publisher.add_labels(1, ["best"])
    for step, expected in ((2, [1, 2]), (3, [1, 3])):
        recorder.save(step)
        assert recorder.store.list_steps() == expected
    assert (
        recorder.store.read_labels() == {"best": 1} and recorder.alarms == ["the disk is full; the run continues"] * 2
    )


def test_all_checkpoints_are_published_if_all_are_kept(make_recorder) -> None:
    recorder = make_recorder(keep=0)
    recorder.may_sync.clear()
    for step in range(1, 6):
        recorder.submit(step)
    recorder.may_sync.set()
    recorder.publisher.wait()
    assert recorder.store.list_steps() == [1, 2, 3, 4, 5]


def test_a_lost_lease_is_raised_and_nothing_is_published(make_recorder, tmp_path) -> None:
    recorder = make_recorder()
    (tmp_path / "lease.json").unlink()
    recorder.report(3)
    recorder.publisher.publish_complete(3)
    for call in (
        recorder.publisher.wait,
        recorder.publisher.raise_error,
        lambda: recorder.publisher.publish_complete(3),
    ):
        with pytest.raises(LeaseLostError):
            call()
    assert recorder.store.list_steps() == [] and not recorder.published


def test_an_unexpected_error_is_raised_in_the_driver(make_recorder, monkeypatch) -> None:
    recorder = make_recorder()

    def fail(*arguments: Any) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(recorder.store, "publish", fail)
    for step in (3, 4):
        recorder.report(step)
    recorder.publisher.publish_complete(4)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        recorder.publisher.wait()
    with pytest.raises(ZeroDivisionError, match="a defect"):
        recorder.publisher.publish_complete(4)
