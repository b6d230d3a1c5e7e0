"""Published, damaged, replaced, pruned: what a run finds on disk when it comes back."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError, LeaseLostError


def assert_content(checkpoint, ranks):
    """The checkpoint holds exactly the state that belongs to its step."""
    expected = ranks.state(checkpoint.step)
    (loaded,) = ranks.holdings({name: torch.zeros_like(whole) for name, whole in expected.items()}, 1)
    read_state(checkpoint, loaded)
    for held in loaded:
        assert torch.equal(held.tensor, expected[held.name]), held.name
    assert checkpoint.meta == {"data": {"next_sample": checkpoint.step * 32}}


def newest(store):
    skipped = []
    return store.find_newest_valid(lambda path, reason: skipped.append((path.name, reason))), skipped


def flip_byte(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def test_nothing_is_there_at_first(store):
    assert store.steps() == [] and newest(store) == (None, [])
    store.remove_leftovers()
    assert store.prune(1) == []


def test_steps_and_the_newest(store, ranks):
    for step in (5, 100, 20):
        ranks.publish(store, step)
    assert store.steps() == [5, 20, 100]
    checkpoint, skipped = newest(store)
    assert (checkpoint.step, checkpoint.generation, skipped) == (100, 1, [])
    assert_content(checkpoint, ranks)
    assert sorted(path.name for path in store.root.iterdir()) == ["step-00000005", "step-00000020", "step-00000100"]


DAMAGE = {
    "truncated": (lambda path: os.truncate(path / "rank-00001.safetensors", 100), "rank-00001.safetensors: 100 bytes"),
    "flipped data": (lambda path: flip_byte(path / "rank-00002.safetensors", -3), "rank-00002.safetensors: checksum"),
    "flipped header": (lambda path: flip_byte(path / "rank-00000.safetensors", 12), "rank-00000.safetensors: checksum"),
    "deleted shard": (lambda path: (path / "rank-00003.safetensors").unlink(), "rank-00003.safetensors: missing"),
    "deleted manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "cut manifest": (lambda path: os.truncate(path / "manifest.json", 200), "manifest.json is not JSON"),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is not JSON"),
    "binary manifest": (lambda path: (path / "manifest.json").write_bytes(b"\x80\xff"), "manifest.json is not JSON"),
    "other manifest": (lambda path: (path / "manifest.json").write_text("[]"), "not of format"),
    "edited manifest": (
        lambda path: (path / "manifest.json").write_text(
            (path / "manifest.json").read_text().replace('"next_sample": 64', '"next_sample": 65')
        ),
        "does not match its own checksum",
    ),
    "no file": (lambda path: [file.unlink() for file in path.iterdir()], "manifest.json is missing"),
    "a directory for a file": (
        lambda path: ((path / "manifest.json").unlink(), (path / "manifest.json").mkdir()),
        "manifest.json cannot be read",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_which(store, ranks, kind):
    damage, reason = DAMAGE[kind]
    ranks.publish(store, 1)
    path = ranks.publish(store, 2)
    damage(path)
    with pytest.raises(CheckpointCorruptedError, match=reason):
        store.verify(2)
    checkpoint, skipped = newest(store)
    assert checkpoint.step == 1
    assert_content(checkpoint, ranks)
    ((name, said),) = skipped
    assert name == "step-00000002" and str(path) in said and reason in said and "\n" not in said


def test_every_flipped_bit_of_the_manifest_is_seen(store, ranks):
    path = ranks.publish(store, 1) / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 37):
        flip_byte(path, position)
        with pytest.raises(CheckpointCorruptedError):
            store.verify(1)
        path.write_bytes(content)
    store.verify(1)


def test_a_manifest_of_another_step_or_with_a_path_is_no_checkpoint(store, ranks, monkeypatch):
    path = ranks.publish(store, 1)
    path.rename(path.with_name("step-00000009"))
    with pytest.raises(CheckpointCorruptedError, match="manifest.json is that of step 1"):
        store.verify(9)
    monkeypatch.setattr("raytrain_hpc.checkpoint.manifest._checksum", lambda manifest: manifest.get("checksum"))
    path = ranks.publish(store, 2) / "manifest.json"
    path.write_text(path.read_text().replace("rank-00001", "../rank-00001"))
    with pytest.raises(CheckpointCorruptedError, match="leaves the directory"):
        store.verify(2)


def test_all_damaged_gives_none_and_names_each(store, ranks):
    for step in (1, 2, 3):
        (ranks.publish(store, step) / "rank-00000.safetensors").unlink()
    checkpoint, skipped = newest(store)
    assert checkpoint is None
    assert [name for name, _ in skipped] == ["step-00000003", "step-00000002", "step-00000001"]


def test_publishing_a_step_again_replaces_it(store, ranks):
    path = ranks.publish(store, 7, degree=4)
    (path / "rank-00000.safetensors").unlink()
    ranks.publish(store, 7, degree=2, generation=2)
    checkpoint, skipped = newest(store)
    assert (checkpoint.generation, len(checkpoint.files), skipped) == (2, 2, [])
    assert_content(checkpoint, ranks)
    assert [path.name for path in store.root.iterdir()] == ["step-00000007"]


def test_a_crash_between_the_two_renames_loses_nothing(store, ranks):
    path = ranks.publish(store, 7)
    ranks.write(store, 7, generation=2)
    path.rename(path.with_name(".replaced-step-00000007"))
    store.remove_leftovers()
    checkpoint, skipped = newest(store)
    assert (checkpoint.generation, skipped) == (1, [])
    assert [path.name for path in store.root.iterdir()] == ["step-00000007"]


def test_a_lost_lease_publishes_nothing(store, ranks):
    ranks.publish(store, 1)
    lease = Lease.acquire(store.root.parent, "first")
    taken = json.loads((store.root.parent / "lease.json").read_text())
    taken.update(owner="second", generation=2)
    (store.root.parent / "lease.json").write_text(json.dumps(taken))
    with pytest.raises(LeaseLostError, match="taken over by second"):
        ranks.publish(store, 2, guard=lease.check)
    with pytest.raises(LeaseLostError):
        ranks.publish(store, 1, guard=lease.check)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    assert_content(newest(store)[0], ranks)


def test_reports_that_do_not_add_up_are_not_published(store, ranks):
    reports = ranks.write(store, 1)
    with pytest.raises(CheckpointError, match=r"no rank has written \S+\[\d"):
        store.publish(1, 1, reports[:-1], {}, lambda: None)
    reports = ranks.write(store, 1)
    (store.root / ".staging-step-00000001-g1" / "rank-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-00002.safetensors: missing"):
        store.publish(1, 1, reports, {}, lambda: None)
    with pytest.raises(CheckpointError, match="rank-00000.safetensors: missing"):
        store.publish(1, 2, reports, {}, lambda: None)
    reports = [ShardReport.from_json(json.loads(json.dumps(one.to_json()))) for one in ranks.write(store, 1)]
    other = ranks.write(store, 3, generation=2, degree=1)
    first = reports[0].entries[0]
    alien = type(first)(first.name, (99,), first.dtype, (0,), (99,), "x")
    with pytest.raises(CheckpointError, match=f"holds {first.name} as .* another rank as"):
        store.publish(1, 1, [*reports, ShardReport("rank-00009.safetensors", 1, "", (alien,))], {}, lambda: None)
    assert store.steps() == []
    assert [path.name for path in store.root.iterdir()] == [".staging-step-00000003-g2"] and len(other) == 1


def test_prune_keeps_the_newest_that_could_be_loaded(store, ranks):
    paths = {step: ranks.publish(store, step) for step in (1, 2, 3, 4, 5)}
    assert store.prune(0) == []
    (paths[4] / "rank-00000.safetensors").unlink()
    (paths[2] / "manifest.json").unlink()
    assert store.prune(2) == [paths[1], paths[2]]
    assert store.steps() == [3, 4, 5]
    for step in (4, 5):
        (paths[step] / "manifest.json").unlink(missing_ok=True)
    assert store.prune(1) == [] and newest(store)[0].step == 3, "the only good one stays"
    (paths[3] / "manifest.json").unlink()
    assert store.prune(1) == []


def test_left_overs_are_discarded_and_checkpoints_are_not(store, ranks):
    ranks.publish(store, 1)
    ranks.write(store, 2, generation=3)
    (store.root / ".pruned-step-00000000").mkdir()
    (store.root / "notes.txt").write_text("mine")
    store.remove_leftovers()
    assert sorted(path.name for path in store.root.iterdir()) == ["notes.txt", "step-00000001"]


def test_a_full_disk_while_publishing_is_an_error_and_leaves_nothing(store, ranks, monkeypatch):
    ranks.publish(store, 1)
    reports = ranks.write(store, 2)

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(CheckpointError, match="cannot be published: No space left on device"):
            store.publish(2, 1, reports, {}, lambda: None)
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    ranks.publish(store, 1, degree=2)
    original = pathlib.Path.rename

    def fails_into_place(self, target):
        if self.name.startswith(".staging"):
            no_space()
        return original(self, target)

    monkeypatch.setattr(pathlib.Path, "rename", fails_into_place)
    with pytest.raises(CheckpointError, match="No space left"):
        ranks.publish(store, 1, degree=4)
    monkeypatch.undo()
    assert len(newest(store)[0].files) == 2, "the one that had stepped aside is back"


def test_a_place_that_cannot_be_written_is_named(ranks, tmp_path, store):
    (tmp_path / "file").write_text("")
    for root, reason in ((tmp_path / "file" / "below", "Not a directory"), (Path("/proc/none"), "No such file")):
        with pytest.raises(CheckpointError, match=f"{root}.* cannot be made: {reason}"):
            type(store)(root).staging(1, 1)


PUBLISHER = """
import itertools, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from conftest import Ranks
from raytrain_hpc.checkpoint.store import CheckpointStore

def publish_for_ever():
    store = CheckpointStore(Path(sys.argv[1]))
    store.remove_leftovers()
    found = store.find_newest_valid(print)
    first = found.step if found else 1
    for turn in itertools.count():  # every step twice: replacing one must be safe too
        Ranks.publish(store, first + turn // 2, generation=turn + 1)
        store.prune(3)

for _ in sys.stdin:  # each life is a fork, so that torch is imported once
    pid = os.fork()
    if pid == 0:
        publish_for_ever()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_newest_valid_complete(store, ranks):
    """Each life starts from what the one before left: at least twelve, and until four were hit in the middle of a
    write."""
    random_s = random.Random(0)
    command = [sys.executable, "-c", PUBLISHER, str(store.root), str(Path(__file__).parent)]
    last, lives, cut_short = 0, 0, 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        while lives < 12 or cut_short < 4:
            lives += 1
            assert lives < 100, "a kill must often hit the middle of a write"
            parent.stdin.write("live\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            deadline = time.monotonic() + 30
            while max(store.steps(), default=0) <= last:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(random_s.uniform(0, 0.1))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            cut_short += any(path.name.startswith(".") for path in store.root.iterdir())
            store.remove_leftovers()
            checkpoint, skipped = newest(store)
            assert skipped == [], "what has the name of a checkpoint is one"
            assert checkpoint.step >= last
            assert_content(checkpoint, ranks)
            last = checkpoint.step
        parent.stdin.close()
