"""Snapshots in shared memory: readable after their process is lost, and never incomplete."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.snapshot.shared_file import OpenedSnapshots, SharedMemoryHandle, SnapshotHandles
from raytrain_hpc.snapshot.shared_memory import AttachedSnapshots, SharedSnapshots
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

# Takes snapshots of steps 1 to 4, writes half of the block of step 5, and then prints the handles.
INTERRUPTED_OWNER = """
import json, sys, time
import torch
from raytrain_hpc.snapshot.shared_memory import SharedSnapshots
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from tests.snapshot.test_shared_memory import make_state

own = SharedSnapshots(make_state(0).to_index())
snapshots = SnapshotStore()
snapshots.reset(1, own)
for step in range(1, 5):
    snapshots.take(step, make_state(step))
slot = own.evict_oldest()
slot.buffer.block[: len(slot.buffer.block) // 2] = 255
print(json.dumps(own.handles), flush=True)
time.sleep(60)
"""


def make_state(step: int) -> ShardedState:
    """Return a state of several dtypes, with one tensor of odd size and one empty tensor."""
    return ShardedState(
        [
            StateShard.from_tensor("w", torch.full((7, 5), float(step), dtype=torch.float64)),
            StateShard.from_tensor("b", torch.arange(3, dtype=torch.bfloat16) + step),
            StateShard.from_tensor("none", torch.empty(0, 4)),
            StateShard.from_tensor("n", torch.tensor(step)),
        ]
    )


def is_equal(a: ShardedState, b: ShardedState) -> bool:
    return a.to_index() == b.to_index() and all(
        torch.equal(shard.tensor, b.get_shard(shard.name, 0).tensor) for shard in a
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_last_complete_snapshot_of_a_lost_process_is_readable(number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED_OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        attached = AttachedSnapshots(SnapshotHandles.from_json(json.loads(child.stdout.readline())))
        os.kill(child.pid, number)
        if number == signal.SIGKILL:
            child.wait(10)
        assert attached.steps == (4,), "step 3 was evicted for step 5, which is incomplete"
        assert is_equal(attached.get_state(4), make_state(4))
        assert not attached.get_state(3) and not attached.get_state(5)
    finally:
        child.kill()
        child.wait(10)
    assert is_equal(attached.get_state(4), make_state(4))


def test_a_peer_sees_snapshots_as_they_are_taken_and_evicted() -> None:
    own = SharedSnapshots(make_state(0).to_index())
    owner, peer = SnapshotStore(), SnapshotStore()
    owner.reset(3, own)
    peer.reset(3, None, {1: AttachedSnapshots(own.handles)})
    assert peer.replica_steps == {1: ()} and not peer.get_state(1)
    for step in range(1, 6):
        owner.take(step, make_state(step))
        assert peer.replica_steps == {1: owner.steps} == {1: tuple(range(max(1, step - 1), step + 1))}
    replica = peer.get_state(5)
    replica.get_shard("w", 0).tensor.zero_()
    assert is_equal(owner.get_state(5), make_state(5)), "a peer's writes do not change the snapshot"
    owner.reset(4)
    assert peer.replica_steps == {1: (4, 5)}, "the snapshots remain until the peer is reset"
    assert is_equal(peer.get_state(4), make_state(4))
    peer.reset(4)
    assert peer.replica_steps == {}


def test_an_empty_state_has_snapshots_too() -> None:
    empty = ShardedState([StateShard.from_tensor("w", torch.empty(0, 3))])
    own = SharedSnapshots(empty.to_index())
    owner, attached = SnapshotStore(), AttachedSnapshots(own.handles)
    owner.reset(1, own)
    owner.take(8, empty)
    assert attached.steps == (8,) and is_equal(attached.get_state(8), empty)


def test_a_handle_with_another_link_target_is_refused() -> None:
    own = SharedSnapshots(make_state(0).to_index())
    (first, second, _), index = own.handles.slots, own.handles.state_index
    with pytest.raises(FileNotFoundError, match="another machine or container"):
        AttachedSnapshots(SnapshotHandles((SharedMemoryHandle(first.path, second.link_target),), index))
    with pytest.raises(OSError):
        AttachedSnapshots(SnapshotHandles((SharedMemoryHandle("/proc/self/fd/987654", first.link_target),), index))


def test_discarded_snapshots_are_invalid_for_others_too() -> None:
    own, replica = SharedSnapshots(make_state(0).to_index()), SharedSnapshots(make_state(0).to_index())
    owner, attached = SnapshotStore(), [AttachedSnapshots(ring.handles) for ring in (own, replica)]
    owner.reset(1, own, None, {2: replica})
    for step in (1, 2):
        owner.take(step, make_state(step))
        owner.reserve_replica(2, make_state(0).to_index()).step = step
    assert [snapshots.steps for snapshots in attached] == [(1, 2), (1, 2)]
    in_transfer = owner.reserve_replica(2, make_state(0).to_index())
    owner.discard_unverified()
    assert [snapshots.steps for snapshots in attached] == [(), ()]
    in_transfer.step = 3
    assert [snapshots.steps for snapshots in attached] == [(), ()], "what arrives later is not to be trusted either"


def test_a_verified_snapshot_is_kept_for_others_too() -> None:
    own, replica = SharedSnapshots(make_state(0).to_index()), SharedSnapshots(make_state(0).to_index())
    owner, attached = SnapshotStore(), [AttachedSnapshots(ring.handles) for ring in (own, replica)]
    owner.reset(1, own, None, {2: replica})
    for step in range(1, 8):
        owner.take(step, make_state(step))
        owner.reserve_replica(2, make_state(0).to_index()).step = step
        if step in (2, 5):
            owner.keep_verified_snapshots(step)
    assert [snapshots.steps for snapshots in attached] == [(5, 6, 7), (5, 6, 7)]
    owner.discard_unverified()
    assert [snapshots.steps for snapshots in attached] == [(5,), (5,)]
    assert (owner.steps, owner.replica_steps) == ((5,), {2: (5,)})
    assert is_equal(attached[0].get_state(5), make_state(5))


def test_only_the_verified_snapshot_of_another_process_is_read_after_a_mismatch() -> None:
    """Also if that process has not discarded the others."""
    own, peer = SharedSnapshots(make_state(0).to_index()), SharedSnapshots(make_state(0).to_index())
    store, of_peer = SnapshotStore(), SnapshotStore()
    of_peer.reset(1, peer)
    store.reset(1, own, {2: AttachedSnapshots(peer.handles)})
    for step in (1, 2):
        for each in (store, of_peer):
            each.take(step, make_state(step))
        if step == 1:
            store.keep_verified_snapshots(step)
    store.discard_unverified()
    assert (store.steps, store.replica_steps) == ((1,), {2: (1,)})
    assert not of_peer.get_state(3).shards and len(store.get_state(2)) == 0


def test_a_third_process_opens_the_memory_through_a_holder() -> None:
    """As a new worker does: the owner has ended, and the agent has the memory open."""
    child = subprocess.Popen([sys.executable, "-c", INTERRUPTED_OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        held = OpenedSnapshots(SnapshotHandles.from_json(json.loads(child.stdout.readline())))
    finally:
        child.kill()
        child.wait(10)
    handles = held.make_handles(4)
    held.keep_step(4)
    reader = AttachedSnapshots(handles)
    assert held.steps == reader.steps == (4,) and not held.make_handles(3).slots
    del held
    assert is_equal(reader.get_state(4), make_state(4))


def test_no_descriptor_stays_open() -> None:
    def count_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count_descriptors()
    for generation in range(3):
        own = SharedSnapshots(make_state(0).to_index())
        owner, peer = SnapshotStore(), SnapshotStore()
        owner.reset(generation, own)
        owner.take(1, make_state(1))
        peer.reset(generation, None, {0: AttachedSnapshots(own.handles)})
        assert is_equal(peer.get_state(1), make_state(1)) and count_descriptors() > before
        del own, owner, peer
        assert count_descriptors() == before
