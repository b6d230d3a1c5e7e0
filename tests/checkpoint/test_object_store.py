"""Checkpoints and leases in an object store: the same guarantees as in a directory, under the faults of a network."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from raytrain_hpc.checkpoint.lease import Lease, check_writable
from raytrain_hpc.checkpoint.manifest import read_manifest
from raytrain_hpc.checkpoint.shard_io import read_state, write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError, LeaseLostError, RunDirectoryError
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.storage.object_path import ObjectPath
from tests.checkpoint.conftest import FakeRanks
from tests.storage.bucket import BUCKET
from tests.storage.s3_server import RandomFaults, make_denied_response, make_slow_down_response

ROOT = "runs/demo/checkpoints"


@pytest.fixture
def store(folder):
    return CheckpointStore(folder / "checkpoints")


def assert_content(checkpoint, degree=1):
    """Assert that ranks of any number that read the checkpoint hold exactly the state of its step."""
    expected = FakeRanks.make_tensors(checkpoint.step)
    empty = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    for state, reference in zip(FakeRanks.shard(empty, degree), FakeRanks.shard(expected, degree), strict=True):
        read_state(checkpoint, state)
        for shard, expected_shard in zip(state, reference, strict=True):
            assert torch.equal(shard.tensor, expected_shard.tensor), shard.name


def find_newest(store):
    skipped = []
    return store.find_newest_valid(lambda path, reason: skipped.append((path.name, reason))), skipped


def test_published_checkpoints_are_found_and_read_in_any_layout(store, s3):
    assert store.list_steps() == [] and find_newest(store) == (None, []) and store.get_newest_time() == 0.0
    for step in (5, 100, 20):
        FakeRanks.publish(store, step)
    assert store.list_steps() == [5, 20, 100] and store.get_newest_time() > 0
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.step, skipped) == (100, [])
    for degree in (1, 3, 5):
        assert_content(checkpoint, degree)
    store.set_labels(20, ["best"])
    assert store.find("best").step == 20
    store.prune(1)
    assert store.list_steps() == [20, 100]
    assert {key.split("/")[3] for key in s3.list_keys(ROOT)} == {"labels.json", "step-00000020", "step-00000100"}


def edit(s3, key, change):
    s3.write(key, change(bytearray(s3.read(key))))


def flip(position):
    def change(content):
        content[position] ^= 0x10
        return bytes(content)

    return change


SHARD, MANIFEST = f"{ROOT}/step-00000002/g1/rank-00001.safetensors", f"{ROOT}/step-00000002/manifest.json"
CORRUPTIONS = {
    "truncated": (lambda s3: edit(s3, SHARD, lambda content: bytes(content[:100])), "100 bytes, expected"),
    "flipped data": (lambda s3: edit(s3, SHARD, flip(-3)), "rank-00001.safetensors: checksum is"),
    "flipped header": (lambda s3: edit(s3, SHARD, flip(12)), "rank-00001.safetensors: checksum is"),
    "deleted shard": (lambda s3: s3.delete(SHARD), "rank-00001.safetensors: missing"),
    "truncated manifest": (lambda s3: edit(s3, MANIFEST, lambda content: bytes(content[:99])), "is not JSON"),
    "flipped manifest": (
        lambda s3: edit(
            s3, MANIFEST, lambda content: bytes(content).replace(b'"next_sample": 64', b'"next_sample": 65')
        ),
        "does not match its own checksum",
    ),
    "foreign directory": (
        lambda s3: edit(s3, MANIFEST, lambda content: rewrite_directory(content, "../step-00000001/g1")),
        "leaves the directory",
    ),
}


def rewrite_directory(content, directory):
    from raytrain_hpc.checkpoint.manifest import _compute_checksum

    manifest = {**json.loads(bytes(content)), "directory": directory}
    return json.dumps({**manifest, "checksum": _compute_checksum(manifest)}).encode()


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_damaged_checkpoint_is_skipped_with_its_reason(store, s3, kind):
    FakeRanks.publish(store, 1)
    FakeRanks.publish(store, 2)
    damage, reason = CORRUPTIONS[kind]
    damage(s3)
    checkpoint, skipped = find_newest(store)
    assert checkpoint.step == 1 and [name for name, _ in skipped] == ["step-00000002"] and reason in skipped[0][1]
    assert_content(checkpoint)


def test_files_without_a_manifest_are_not_a_checkpoint(store, s3):
    FakeRanks.publish(store, 1)
    FakeRanks.write(store, 2)
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.step, skipped, store.list_steps()) == (1, [], [1])
    s3.delete(f"{ROOT}/step-00000001/manifest.json")
    assert find_newest(store) == (None, [])


@pytest.mark.parametrize("change", [flip(-3), flip(9), lambda content: bytes(content[:-20])])
def test_damage_after_verification_is_noticed_by_the_rank_that_reads(store, s3, change):
    FakeRanks.publish(store, 2)
    checkpoint, _ = find_newest(store)
    for rank in range(4):
        edit(s3, SHARD.replace("rank-00001", f"rank-0000{rank}"), change)
    with pytest.raises(CheckpointCorruptedError, match="does not match the manifest"):
        assert_content(checkpoint)
    s3.delete(SHARD)
    with pytest.raises(CheckpointCorruptedError, match="missing|does not match"):
        assert_content(checkpoint)


def test_a_rank_requests_only_the_blocks_of_its_rows(folder, s3):
    rows = torch.randn(6000, 1024)  # 23.4 MiB in blocks of 4 MiB
    store = CheckpointStore(folder / "checkpoints")
    reports = [write_shard(store.create_staging(1, 1) / "rank-00000.safetensors", [StateShard.from_tensor("w", rows)])]
    checkpoint = read_manifest(store.publish(1, 1, reports, {}, lambda: None))
    s3.requests.clear()
    box = Box((2500, 100), (700, 50))
    part = StateShard("w", (6000, 1024), "float32", box, torch.zeros(700, 50))
    read_state(checkpoint, ShardedState([part]))
    assert torch.equal(part.tensor, rows[2500:3200, 100:150])
    ranges = [request.range.removeprefix("bytes=").split("-") for request in s3.requests if request.range]
    assert sum(int(stop) + 1 - int(start) for start, stop in ranges) <= 4 * 4 * 2**20  # the header's block twice
    everything = StateShard("w", (6000, 1024), "float32", Box.from_shape((6000, 1024)), torch.zeros(6000, 1024))
    read_state(checkpoint, ShardedState([everything]))
    assert torch.equal(everything.tensor, rows)


def test_publishing_a_step_again_replaces_its_checkpoint(store, s3):
    FakeRanks.publish(store, 7, degree=4, generation=1)
    FakeRanks.publish(store, 7, degree=2, generation=3)
    checkpoint, skipped = find_newest(store)
    assert checkpoint.generation == 3 and not skipped
    assert_content(checkpoint)
    assert not s3.list_keys(f"{ROOT}/step-00000007/g1/")


def test_of_two_drivers_that_publish_the_same_step_one_does(store):
    """The second driver publishes after the first has checked its lease, as one that was paused there would do."""
    other = CheckpointStore(store.root)
    with pytest.raises(CheckpointError, match="another writer was first"):
        FakeRanks.publish(
            store, 7, generation=1, pre_publish=lambda: FakeRanks.publish(other, 7, degree=2, generation=2) and None
        )
    checkpoint, skipped = find_newest(store)
    assert (checkpoint.generation, skipped) == (2, [])
    assert_content(checkpoint)


def test_without_the_lease_nothing_is_published(store, folder, s3):
    lease = Lease.acquire(folder, "first")
    stolen = replace(lease._record, owner="second", generation=9)
    (folder / "lease.json").write_bytes(json.dumps(stolen.__dict__).encode())
    with pytest.raises(LeaseLostError, match="taken over by second"):
        FakeRanks.publish(store, 3, pre_publish=lease.check)
    assert s3.list_keys(ROOT) == []


def test_leftovers_are_removed_and_checkpoints_are_kept(store, s3):
    FakeRanks.publish(store, 1)
    FakeRanks.write(store, 2, generation=4)
    FakeRanks.write(store, 1, generation=5)
    store.remove_leftovers()
    assert {key.split("/", 3)[3].rsplit("/", 1)[0] for key in s3.list_keys(ROOT)} == {
        "step-00000001",
        "step-00000001/g1",
    }
    assert_content(find_newest(store)[0])


def test_files_that_earlier_generations_have_abandoned_are_found(store, s3):
    FakeRanks.publish(store, 1, generation=2)
    for step, generation in ((1, 1), (1, 3), (1, 5), (2, 4), (2, 5), (3, 10)):
        FakeRanks.write(store, step, generation=generation)
    damaged = FakeRanks.publish(store, 4, generation=1)
    FakeRanks.write(store, 4, generation=2)
    (damaged / "manifest.json").write_bytes(b"{}")
    assert store.list_abandoned(5) == [(1, 1), (1, 3), (2, 4)]
    for key in store.list_abandoned(5):
        store.discard(*key)
    directories = {key.split("/", 3)[3].rpartition("/")[0] for key in s3.list_keys(ROOT) if key.endswith("safetensors")}
    assert sorted(directories) == [
        f"step-{step:08}/g{generation}" for step, generation in ((1, 2), (1, 5), (2, 5), (3, 10), (4, 1), (4, 2))
    ]


def test_a_deletion_spares_what_a_later_generation_uploads(store, s3):
    """A step that is not trusted any more may be deleted while it is saved again."""
    for step in (60, 70, 80):
        FakeRanks.publish(store, step)
    store.distrust(60, 1, "rank 1, corrupt")
    reports = FakeRanks.write(store, 80, generation=10)
    assert store.prune(1) == [store.get_path(70), store.get_path(80)] and store.list_steps() == [60]
    assert not s3.list_keys(f"{ROOT}/step-00000070/") and not s3.list_keys(f"{ROOT}/step-00000080/g1/")
    store.publish(80, 10, reports, {"data": {"next_sample": 80 * 32}}, lambda: None)
    assert_content(find_newest(store)[0])


def test_a_deletion_that_is_interrupted_leaves_a_leftover_not_a_damaged_checkpoint(store, s3):
    FakeRanks.publish(store, 1)
    FakeRanks.publish(store, 2)

    def fail_after_the_first(request, forward):
        is_deletion = request.method == "DELETE" or "delete" in request.query
        deletions.append(is_deletion)
        return make_denied_response() if is_deletion and sum(deletions) > 1 else forward()

    deletions = []
    with s3.intercepting(fail_after_the_first), pytest.raises(CheckpointError, match="cannot be deleted"):
        store.prune(1)
    assert store.list_steps() == [2] and s3.list_keys(f"{ROOT}/step-00000001/")
    store.remove_leftovers()
    assert not s3.list_keys(f"{ROOT}/step-00000001/")


def test_with_every_third_request_failing_nothing_is_lost(store, s3):
    faults = RandomFaults(0.33, seed=3)
    with s3.intercepting(faults):
        for step in range(1, 6):
            FakeRanks.publish(store, step)
            store.prune(2)
        checkpoint, skipped = find_newest(store)
        assert (checkpoint.step, skipped) == (5, [])
        assert_content(checkpoint, 3)
        store.remove_leftovers()
    assert faults.count > 30 and store.list_steps() == [4, 5] and s3.count_unfinished_uploads() == 0


def test_an_answer_that_is_lost_does_not_fail_the_checkpoint(store, s3):
    """The server executes the write, its answer is lost, and the repeated write finds it done: by this driver."""
    seen = set()

    def lose_first_answer(request, forward):
        answer = forward()
        if request.method != "PUT" or request.path in seen:
            return answer
        seen.add(request.path)
        return make_slow_down_response()

    with s3.intercepting(lose_first_answer):
        FakeRanks.publish(store, 1)
    assert len(seen) == 5
    assert_content(find_newest(store)[0])


def test_a_store_that_refuses_credentials_says_nothing_about_its_checkpoints(store, s3):
    """Otherwise a run would resume from an older checkpoint, or from the start, and delete newer ones."""
    FakeRanks.publish(store, 1)
    FakeRanks.publish(store, 2)
    checkpoint, _ = find_newest(store)
    for when in ("manifest.json", "rank-00002"):
        expire = lambda request, forward: make_denied_response() if when in request.path else forward()  # noqa: B023, E731
        with s3.intercepting(expire), pytest.raises(CheckpointError, match="cannot be read: 400 Bad Request") as error:
            find_newest(store)
        assert not isinstance(error.value, CheckpointCorruptedError)
    with s3.intercepting(lambda request, forward: make_denied_response()):
        for call in (store.list_steps, lambda: store.prune(1), store.remove_leftovers, store.get_newest_time):
            with pytest.raises(CheckpointError, match="ExpiredToken"):
                call()
        with pytest.raises(CheckpointError, match="ExpiredToken"):
            read_state(checkpoint, FakeRanks.shard(FakeRanks.make_tensors(0), 1)[0])
        store.discard(5, 1)
    assert store.list_steps() == [1, 2]


def test_the_lease_excludes_other_drivers_and_counts_generations(folder):
    lease = Lease.acquire(folder, "first")
    assert lease.generation == 1 and lease.next_generation() == 2
    with pytest.raises(RunDirectoryError, match="another driver"):
        Lease.acquire(folder, "second")
    with pytest.raises(RunDirectoryError, match="another driver"):
        Lease.check_available(folder)
    lease.renew()
    lease.release()
    Lease.check_available(folder)
    second = Lease.acquire(folder, "second")
    assert second.generation == 3
    for call in (lease.check, lease.renew, lease.next_generation, lease.release):
        with pytest.raises(LeaseLostError, match="taken over by second"):
            call()
    second.check()


def test_one_of_many_simultaneous_drivers_acquires_the_lease(folder):
    barrier = threading.Barrier(6)

    def acquire(number):
        barrier.wait(10)
        try:
            return Lease.acquire(folder, f"driver {number}").owner
        except RunDirectoryError:
            return None

    with ThreadPoolExecutor(6) as pool:
        owners = [owner for owner in pool.map(acquire, range(6)) if owner]
    assert len(owners) == 1 and json.loads((folder / "lease.json").read_bytes())["owner"] == owners[0]


def test_the_lease_holds_while_requests_fail(folder, s3):
    with s3.intercepting(RandomFaults(0.4, seed=5)):
        lease = Lease.acquire(folder, "driver")
        assert [lease.next_generation() for _ in range(20)] == list(range(2, 22))
        lease.check()
        lease.release()


def test_a_slow_store_does_not_delay_a_generation(folder, s3):
    lease = Lease.acquire(folder, "driver")

    def answer_late(request, forward):
        time.sleep(3)
        return forward()

    with s3.intercepting(answer_late):
        start = time.monotonic()
        assert lease.next_generation() == 2 and time.monotonic() - start < 2
    lease.renew()
    assert json.loads((folder / "lease.json").read_bytes())["generation"] == 2


def test_a_store_that_does_not_answer_is_not_a_lost_lease(folder, s3):
    lease = Lease.acquire(folder, "driver")
    with s3.intercepting(lambda request, forward: make_denied_response()):
        for call in (lease.check, lease.renew):
            with pytest.raises(RunDirectoryError, match="ExpiredToken") as error:
                call()
            assert not isinstance(error.value, LeaseLostError)
        assert lease.next_generation() == 2
    lease.renew()
    assert json.loads((folder / "lease.json").read_bytes())["generation"] == 2


def test_a_run_directory_is_probed_for_access_and_conditional_writes(folder, s3):
    check_writable(folder)
    assert s3.list_keys() == []
    with pytest.raises(RunDirectoryError, match=r"run.dir=s3://unknown/x: cannot be written: there is no such bucket"):
        check_writable(ObjectPath.from_url("s3://unknown/x"))
    with s3.intercepting(RandomFaults(0.4, seed=1)):  # answers to requests that were executed are lost, too
        for _ in range(10):
            check_writable(folder)
    ignore = lambda request, forward: forward() if request.method != "PUT" else put_anyway(s3, request)  # noqa: E731
    with s3.intercepting(ignore), pytest.raises(RunDirectoryError, match="ignores conditional writes"):
        check_writable(folder)
    assert s3.list_keys() == []


def put_anyway(s3, request):
    from werkzeug.wrappers import Response

    s3.client.put_object(Bucket=BUCKET, Key=request.path.split("/", 2)[2], Body=b"x") if s3.intercept is None else None
    return Response("", headers={"ETag": '"1"'})


def test_uploads_of_a_killed_process_are_aborted_by_the_next_driver(store, s3):
    for key in (f"{ROOT}/step-00000009/g1/rank-00000.safetensors", "runs/other/x"):
        s3.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    store.remove_leftovers()
    assert s3.count_unfinished_uploads() == 1


def test_the_files_of_a_failed_publication_are_deleted(store, s3):
    reports = FakeRanks.write(store, 4)
    with pytest.raises(CheckpointError, match="no rank has written"):
        store.publish(4, 1, reports[:-1], {}, lambda: None)
    assert s3.list_keys() == [] and store.list_steps() == []
