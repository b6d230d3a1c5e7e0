"""Snapshots that a node's processes share: whole when their process is gone, and never half of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots, SharedMemoryHandle, create_shared_snapshots
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

# Takes steps 1 to 4, and is half through the block of step 5 when it says so.
DYING = """
import json, sys, time
import torch
from raytrain_hpc.snapshot.shared_memory import create_shared_snapshots
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from tests.snapshot.test_shared_memory import state

own, openings = create_shared_snapshots()
memory = SnapshotStore()
memory.reset(1, own)
for step in range(1, 5):
    memory.take(step, state(step))
slot = own.evict_oldest()
slot.buffer.block[: len(slot.buffer.block) // 2] = 255
print(json.dumps(openings), flush=True)
time.sleep(60)
"""


def state(step: int) -> ShardedState:
    """Of several types, one of them of odd size, one empty."""
    return ShardedState(
        [
            StateShard.from_tensor("w", torch.full((7, 5), float(step), dtype=torch.float64)),
            StateShard.from_tensor("b", torch.arange(3, dtype=torch.bfloat16) + step),
            StateShard.from_tensor("none", torch.empty(0, 4)),
            StateShard.from_tensor("n", torch.tensor(step)),
        ]
    )


def equal(one: ShardedState, other: ShardedState) -> bool:
    return one.to_index() == other.to_index() and all(
        torch.equal(held.tensor, other.get_shard(held.name, 0).tensor) for held in one
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_process_had_whole_is_there(number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        openings = [SharedMemoryHandle(*one) for one in json.loads(child.stdout.readline())]
        opened = AttachedSnapshots(openings, state(0).to_index())
        os.kill(child.pid, number)
        if number == signal.SIGKILL:
            child.wait(10)
        assert opened.steps == (4,), "the third was given up for the fifth, of which half is there"
        assert equal(opened.get_state(4), state(4)) and not opened.get_state(3) and not opened.get_state(5)
    finally:
        child.kill()
        child.wait(10)
    assert equal(opened.get_state(4), state(4))


def test_its_steps_are_seen_as_they_come_and_go() -> None:
    own, openings = create_shared_snapshots()
    memory, buddy = SnapshotStore(), SnapshotStore()
    memory.reset(3, own)
    buddy.reset(3, None, {1: AttachedSnapshots(openings, state(0).to_index())})
    assert buddy.replica_steps == {1: ()} and not buddy.get_state(1)
    for step in range(1, 6):
        memory.take(step, state(step))
        assert buddy.replica_steps == {1: memory.steps} == {1: tuple(range(max(1, step - 1), step + 1))}
    seen = buddy.get_state(5)
    seen.get_shard("w", 0).tensor.zero_()
    assert equal(memory.get_state(5), state(5)), "what one does with it is its own"
    memory.reset(4)
    assert buddy.replica_steps == {1: (4, 5)} and equal(buddy.get_state(4), state(4)), "until the buddy begins anew"
    buddy.reset(4)
    assert buddy.replica_steps == {}


def test_a_rank_that_holds_nothing_has_steps_all_the_same() -> None:
    nothing = ShardedState([StateShard.from_tensor("w", torch.empty(0, 3))])
    own, openings = create_shared_snapshots()
    memory, opened = SnapshotStore(), AttachedSnapshots(openings, nothing.to_index())
    memory.reset(1, own)
    memory.take(8, nothing)
    assert opened.steps == (8,) and equal(opened.get_state(8), nothing)


def test_another_file_of_that_name_is_not_taken_for_it() -> None:
    _, (first, second) = create_shared_snapshots()
    with pytest.raises(FileNotFoundError, match="another machine or container"):
        AttachedSnapshots([SharedMemoryHandle(first.path, second.link_target)], state(0).to_index())
    with pytest.raises(OSError):
        AttachedSnapshots([SharedMemoryHandle("/proc/self/fd/987654", first.link_target)], state(0).to_index())


def test_nothing_stays_open() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for generation in range(3):
        own, openings = create_shared_snapshots()
        memory, buddy = SnapshotStore(), SnapshotStore()
        memory.reset(generation, own)
        memory.take(1, state(1))
        buddy.reset(generation, None, {0: AttachedSnapshots(openings, state(0).to_index())})
        assert equal(buddy.get_state(1), state(1)) and count() > before
        del own, memory, buddy
        assert count() == before
