"""Publishing, verifying, replacing and pruning checkpoints, and finding the newest valid one after a crash."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.retention import select_kept_steps
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.driver.run_setup import find_newest_checkpoint
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError, LeaseLostError
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


def assert_content(checkpoint, ranks):
    """Assert that the checkpoint holds exactly the state of its step."""
    expected = ranks.make_tensors(checkpoint.step)
    (state,) = ranks.shard({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, 1)
    read_state(checkpoint, state)
    for shard in state:
        assert torch.equal(shard.tensor, expected[shard.name]), shard.name
    assert checkpoint.meta == {"data": {"next_sample": checkpoint.step * 32}}


def find_newest(store):
    """Return the newest valid checkpoint, and (name, reason) of the corrupted ones that were skipped."""
    skipped = []
    return store.find_newest_valid(lambda path, reason: skipped.append((path.name, reason))), skipped


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_an_empty_store_has_no_checkpoints(store):
    assert store.list_steps() == [] and find_newest(store) == (None, [])
    store.remove_leftovers()
    assert store.prune(1) == []


def test_published_steps_are_listed_and_the_newest_is_found(store, ranks):
    for step in (5, 100, 20):
        ranks.publish(store, step)
    assert store.list_steps() == [5, 20, 100]
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.step, checkpoint.generation, skipped) == (100, 1, [])
    assert_content(checkpoint, ranks)
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000005", "step-00000020", "step-00000100"]


CORRUPTIONS = {
    "truncated": (lambda path: os.truncate(path / "rank-00001.safetensors", 100), "rank-00001.safetensors: 100 bytes"),
    "flipped data": (lambda path: flip_byte(path / "rank-00002.safetensors", -3), "rank-00002.safetensors: checksum"),
    "flipped header": (lambda path: flip_byte(path / "rank-00000.safetensors", 12), "rank-00000.safetensors: checksum"),
    "deleted shard": (lambda path: (path / "rank-00003.safetensors").unlink(), "rank-00003.safetensors: missing"),
    "deleted manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "truncated manifest": (lambda path: os.truncate(path / "manifest.json", 200), "manifest.json is not JSON"),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is not JSON"),
    "binary manifest": (lambda path: (path / "manifest.json").write_bytes(b"\x80\xff"), "manifest.json is not JSON"),
    "other manifest": (lambda path: (path / "manifest.json").write_text("[]"), "not of format"),
    "edited manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"next_sample": 64', '"next_sample": 65')
        ),
        "does not match its own checksum",
    ),
    "empty directory": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json is missing"),
    "directory in place of the manifest": (
        lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corrupted_checkpoint_is_skipped_with_its_reason_and_the_previous_one_is_found(store, ranks, kind):
    corrupt, reason = CORRUPTIONS[kind]
    ranks.publish(store, 1)
    path = ranks.publish(store, 2)
    corrupt(path)
    with pytest.raises(CheckpointCorruptedError, match=reason):
        store.verify(2)
    checkpoint, skipped = find_newest(store)
    assert checkpoint.step == 1
    assert_content(checkpoint, ranks)
    ((name, message),) = skipped
    assert name == "step-00000002" and str(path) in message and reason in message and "\n" not in message


def test_a_flipped_bit_in_the_manifest_is_detected(store, ranks):
    path = ranks.publish(store, 1) / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 37):
        flip_byte(path, position)
        with pytest.raises(CheckpointCorruptedError):
            store.verify(1)
        path.write_bytes(content)
    store.verify(1)


def test_a_manifest_of_another_step_or_with_a_path_outside_is_refused(store, ranks, monkeypatch):
    path = ranks.publish(store, 1)
    path.rename(path.with_name("step-00000009"))
    with pytest.raises(CheckpointCorruptedError, match="manifest.json is that of step 1"):
        store.verify(9)
    monkeypatch.setattr("raytrain_hpc.checkpoint.manifest._compute_checksum", lambda manifest: manifest.get("checksum"))
    path = ranks.publish(store, 2) / "manifest.json"
    path.write_text(path.read_text().replace("rank-00001", "../rank-00001"))
    with pytest.raises(CheckpointCorruptedError, match="leaves the directory"):
        store.verify(2)


def test_without_a_valid_checkpoint_the_result_is_none_and_each_is_named(store, ranks):
    for step in (1, 2, 3):
        (ranks.publish(store, step) / "rank-00000.safetensors").unlink()
    checkpoint, skipped = find_newest(store)
    assert checkpoint is None
    assert [name for name, _ in skipped] == ["step-00000003", "step-00000002", "step-00000001"]


def test_publishing_a_step_again_replaces_its_checkpoint(store, ranks):
    path = ranks.publish(store, 7, degree=4)
    (path / "rank-00000.safetensors").unlink()
    ranks.publish(store, 7, degree=2, generation=2)
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.generation, len(checkpoint.files), skipped) == (2, 2, [])
    assert_content(checkpoint, ranks)
    assert [path.name for path in store.root.iterdir()] == ["step-00000007"]


def test_a_run_starts_over_if_nothing_after_its_start_is_trusted(store, ranks):
    for step in (10, 20):
        ranks.publish(store, step, generation=2)
    warnings: list[str] = []
    store.distrust(5, 2, "the last audit")
    with pytest.raises(CheckpointCorruptedError, match="step-00000020, step-00000010.* remove them to start over"):
        find_newest_checkpoint(store, warnings.append)
    store.distrust(0, 2, "no audit yet")
    assert find_newest_checkpoint(store, warnings.append) is None
    assert warnings[-1].startswith("checkpoint skipped: ")
    ranks.publish(store, 30, generation=3)
    store.distrust(25, 3, "much later")
    with pytest.raises(CheckpointCorruptedError, match="remove them to start over"):
        find_newest_checkpoint(store, warnings.append)
    store.distrust(0, 3, "the start again")
    (ranks.publish(store, 40, generation=4) / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointCorruptedError, match="remove them to start over"):
        find_newest_checkpoint(store, warnings.append)


def test_checkpoints_that_may_be_spoilt_are_skipped_until_they_are_saved_again(store, ranks):
    store.distrust(0, 1, "nothing is saved here yet")
    assert store.find_distrust(5, 1) and store.list_steps() == []
    with pytest.raises(CheckpointError, match="untrusted.json cannot be written: No such file"):
        type(store)(store.root / "not" / "mounted").distrust(0, 1, "nothing is saved here yet")
    for step in (10, 20, 30):
        ranks.publish(store, step, generation=2)
    store.distrust(20, 2, "rank 1, faulty device")
    newest, skipped = find_newest(store)
    reason = "saved after step 20, the last one known to be right: rank 1, faulty device"
    assert newest.step == 20 and skipped == [("step-00000030", reason)]
    assert store.find_distrust(30, 2) == reason
    assert store.find_distrust(20, 2) is store.find_distrust(30, 3) is None
    store.distrust(10, 3, "again")
    assert find_newest(store)[0].step == 10
    ranks.publish(store, 30, generation=4)
    assert find_newest(CheckpointStore(store.root))[0].step == 30
    (store.root / "untrusted.json").write_bytes(b"[{")
    with pytest.raises(CheckpointError, match="untrusted.json cannot be read: .*; remove it to trust all checkpoints"):
        find_newest(store)


def test_a_crash_between_the_two_renames_loses_no_checkpoint(store, ranks):
    path = ranks.publish(store, 7)
    ranks.write(store, 7, generation=2)
    path.rename(path.with_name(".replaced-step-00000007"))
    store.remove_leftovers()
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.generation, skipped) == (1, [])
    assert [path.name for path in store.root.iterdir()] == ["step-00000007"]


def test_a_driver_without_the_lease_cannot_publish(store, ranks):
    ranks.publish(store, 1)
    lease = Lease.acquire(store.root.parent, "first")
    other_lease = json.loads((store.root.parent / "lease.json").read_text())
    other_lease.update(owner="second", generation=2)
    (store.root.parent / "lease.json").write_text(json.dumps(other_lease))
    with pytest.raises(LeaseLostError, match="taken over by second"):
        ranks.publish(store, 2, pre_publish=lease.check)
    with pytest.raises(LeaseLostError):
        ranks.publish(store, 1, pre_publish=lease.check)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    assert_content(find_newest(store)[0], ranks)


def test_incomplete_or_inconsistent_reports_are_not_published(store, ranks):
    reports = ranks.write(store, 1)
    with pytest.raises(CheckpointError, match=r"no rank has written \S+\[\d"):
        store.publish(1, 1, reports[:-1], {}, lambda: None)
    reports = ranks.write(store, 1)
    (store.root / ".staging-step-00000001-g1" / "rank-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00002.safetensors: missing"):
        store.publish(1, 1, reports, {}, lambda: None)
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: missing"):
        store.publish(1, 2, reports, {}, lambda: None)
    reports = [ShardReport.from_json(json.loads(json.dumps(report.to_json()))) for report in ranks.write(store, 1)]
    other_reports = ranks.write(store, 3, generation=2, degree=1)
    first = reports[0].entries[0]
    conflicting = type(first)(first.name, (99,), first.dtype, (0,), (99,), "x")
    with pytest.raises(CheckpointError, match=f"holds {first.name} as .* another rank as"):
        store.publish(1, 1, [*reports, replace(reports[0], entries=(conflicting,))], {}, lambda: None)
    assert store.list_steps() == []
    assert [path.name for path in store.root.iterdir()] == [".staging-step-00000003-g2"] and len(other_reports) == 1


def test_prune_keeps_the_newest_loadable_checkpoints(store, ranks):
    paths = {step: ranks.publish(store, step) for step in (1, 2, 3, 4, 5)}
    assert store.prune(0) == []
    (paths[4] / "rank-00000.safetensors").unlink()
    (paths[2] / "manifest.json").unlink()
    assert store.prune(2) == [paths[1], paths[2]]
    assert store.list_steps() == [3, 4, 5]
    for step in (4, 5):
        (paths[step] / "manifest.json").unlink(missing_ok=True)
    assert store.prune(1) == [] and find_newest(store)[0].step == 3, "the only loadable one is kept"
    (paths[3] / "manifest.json").unlink()
    assert store.prune(1) == []


def test_retained_are_the_newest_and_those_that_a_fault_may_lead_back_to():
    """Compared with the definition, over all sets of five steps."""
    for bits in range(32):
        steps = [10 * number for number in range(5) if bits >> number & 1]
        for keep, first, second in itertools.product((1, 2), range(-5, 50, 5), (15, 40)):
            expected = set(steps[-keep:])
            for fallback in (first, second):
                expected |= {s for s in steps if s <= fallback and not any(s < other <= fallback for other in steps)}
            assert select_kept_steps(steps[::-1], keep, [first, second]) == expected


def test_prune_does_not_count_what_a_run_cannot_resume_from(store, ranks):
    """The content of the newest one is damaged, which its sizes do not show; another has a label."""
    for step in (10, 20, 30):
        ranks.publish(store, step)
    store.set_labels(20, ["best"])
    flip_byte(store.get_path(30) / "rank-00000.safetensors", -9)
    assert find_newest(store)[0].step == 20 and not store.is_usable(30)
    store.distrust(10, 1, "rank 1, corrupt")
    assert [step for step in store.list_steps() if store.is_usable(step)] == [10]
    ranks.publish(store, 15, generation=2)
    assert store.prune(2) == [], "of four, two are usable, one has a label, and one is damaged"
    ranks.publish(store, 18, generation=2)
    assert store.prune(1) == [store.get_path(step) for step in (10, 15)]
    ranks.publish(store, 30, generation=2)
    assert store.is_usable(30) and store.prune(1) == [store.get_path(18)] and store.list_steps() == [20, 30]


def test_the_checkpoints_that_a_fault_may_lead_back_to_are_kept(store, ranks):
    for step in (0, 10, 20, 30, 40):
        ranks.publish(store, step)
    (store.get_path(20) / "rank-00001.safetensors").unlink()
    assert store.prune(1, [25]) == [store.get_path(step) for step in (0, 20, 30)], "20 is damaged"
    assert store.prune(1, [5]) == [store.get_path(10)], "there is none"
    assert store.prune(1, [50, 60]) == [] and store.list_steps() == [40]


def test_leftovers_are_removed_and_checkpoints_are_kept(store, ranks):
    ranks.publish(store, 1)
    ranks.write(store, 2, generation=3)
    (store.root / ".pruned-step-00000000").mkdir()
    (store.root / "notes.txt").write_text("mine")
    store.remove_leftovers()
    assert sorted(path.name for path in store.root.iterdir()) == ["notes.txt", "step-00000001"]


def test_a_full_disk_while_publishing_is_an_error_and_leaves_no_partial_checkpoint(store, ranks, monkeypatch):
    ranks.publish(store, 1)
    reports = ranks.write(store, 2)

    def raise_no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_no_space)
        with pytest.raises(CheckpointError, match="cannot be published: No space left on device"):
            store.publish(2, 1, reports, {}, lambda: None)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    ranks.publish(store, 1, degree=2)
    rename = pathlib.Path.rename

    def fail_on_staging(self, target):
        if self.name.startswith(".staging"):
            raise_no_space()
        return rename(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fail_on_staging)
    with pytest.raises(CheckpointError, match="No space left"):
        ranks.publish(store, 1, degree=4)
    monkeypatch.undo()
    assert len(find_newest(store)[0].files) == 2, "the earlier one is restored"


def test_a_staging_directory_that_cannot_be_created_is_named(ranks, tmp_path, store):
    (tmp_path / "file").write_text("")
    for root, reason in ((tmp_path / "file" / "below", "Not a directory"), (Path("/proc/none"), "No such file")):
        with pytest.raises(CheckpointError, match=f"{root}.* cannot be created: {reason}"):
            type(store)(root).create_staging(1, 1)


PUBLISHER = """
import itertools, os, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import FakeRanks
from raytrain_hpc.checkpoint.store import CheckpointStore

def publish_forever():
    store = CheckpointStore(Path(sys.argv[1]))
    store.remove_leftovers()
    newest = store.find_newest_valid(print)
    first = newest.step if newest else 1
    for turn in itertools.count():  # each step twice, because replacing a checkpoint must be safe too
        FakeRanks.publish(store, first + turn // 2, generation=turn + 1)
        store.prune(3)

for _ in sys.stdin:  # each round is a fork, so that torch is imported once
    pid = os.fork()
    if pid == 0:
        publish_forever()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_newest_checkpoint_complete(store, ranks):
    """Kill a publisher at random moments; the next one continues from its files.

    At least twelve rounds, and until four kills have interrupted a write.
    """
    rng = random.Random(0)
    command = [sys.executable, "-c", PUBLISHER, str(store.root), str(Path(__file__).parent)]
    last_step, rounds, interrupted_writes = 0, 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        while rounds < 12 or interrupted_writes < 4:
            rounds += 1
            assert rounds < 100, "a kill must often interrupt a write"
            parent.stdin.write("start\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            deadline = time.monotonic() + 30
            while max(store.list_steps(), default=0) <= last_step:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            interrupted_writes += any(path.name.startswith(".") for path in store.root.iterdir())
            store.remove_leftovers()
            checkpoint, skipped = find_newest(store)
            assert skipped == [], "every directory with the name of a checkpoint must be valid"
            assert checkpoint.step >= last_step
            assert_content(checkpoint, ranks)
            last_step = checkpoint.step
        parent.stdin.close()


@pytest.mark.parametrize("version", ["format-1", "format-2"])
def test_checkpoints_of_earlier_versions_are_verified_and_read(version, tmp_path):
    shutil.copytree(Path(__file__).parent / "golden" / version, tmp_path, dirs_exist_ok=True)
    checkpoint = CheckpointStore(tmp_path).verify(42)
    assert (checkpoint.step, checkpoint.generation, set(checkpoint.meta)) == (42, 5, {"note"})
    state = ShardedState(
        StateShard.from_tensor(name, tensor)
        for name, tensor in {
            "model.w": torch.zeros(7, 3),
            "model.b": torch.zeros(5).bfloat16(),
            "optimizer.step": torch.tensor(0),
        }.items()
    )
    read_state(checkpoint, state)
    w, b, step = (shard.tensor for shard in state)
    assert (
        torch.equal(w, torch.arange(21.0).reshape(7, 3)) and torch.equal(b, torch.arange(5).bfloat16()) and step == 42
    )
    flip_byte(tmp_path / "step-00000042" / "rank-00001.safetensors", -1)
    with pytest.raises(CheckpointCorruptedError, match="rank-00001.safetensors: checksum is"):
        CheckpointStore(tmp_path).verify(42)
