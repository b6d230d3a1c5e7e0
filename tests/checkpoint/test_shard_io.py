"""Checkpoint content is bit-identical: written and read in any layout, and by the safetensors library."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import read_state, write_shard
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, compute_digest


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("write_degree", [1, 3, 4])
@pytest.mark.parametrize("read_degree", [1, 2, 3, 6])
def test_any_degree_reads_a_checkpoint_of_any_degree(store, ranks, write_degree, read_degree):
    ranks.publish(store, 3, degree=write_degree)
    checkpoint = store.verify(3)
    tensors = ranks.make_tensors(3)
    expected_states, states = ranks.shard(tensors, read_degree), ranks.shard(zeros_like(tensors), read_degree)
    for rank in range(read_degree):
        read_state(checkpoint, states[rank])
        for shard, expected in zip(states[rank], expected_states[rank], strict=True):
            assert torch.equal(shard.tensor, expected.tensor), (rank, shard.name)
        assert compute_digest(states[rank]) == compute_digest(expected_states[rank])


def test_columns_are_read_from_row_shards(store, ranks):
    ranks.publish(store, 3, degree=4)
    tensor = ranks.make_tensors(3)["model.head.weight"]
    column = torch.zeros(11, 3, 4)[:, :, 1]  # a view that is not contiguous
    target = StateShard.from_tensor("model.head.weight", torch.zeros(11, 3, 2))
    target = StateShard(target.name, target.shape, target.dtype, Box((0, 0, 1), (11, 3, 1)), column[..., None])
    read_state(store.verify(3), ShardedState([target]))
    assert torch.equal(column, tensor[:, :, 1])


def test_a_shard_file_is_plain_safetensors_and_matches_its_report(tmp_path):
    tensors = [torch.randn(5, 3), torch.randn(7).bfloat16(), torch.tensor(3), torch.randn(4, 6).t(), torch.zeros(0, 2)]
    tensors.append(torch.tensor([True, False]))
    shards = [StateShard.from_tensor(f"t{number}", tensor) for number, tensor in enumerate(tensors)]
    report = write_shard(tmp_path / "x.safetensors", shards)
    content = (tmp_path / "x.safetensors").read_bytes()
    assert (report.file, report.checksum.bytes) == ("x.safetensors", len(content))
    assert report.checksum.digest == xxhash.xxh3_128(content).hexdigest()
    assert int.from_bytes(content[:8], "little") % 8 == 0, "data is aligned"
    stored = load_file(tmp_path / "x.safetensors")
    assert list(stored) and set(stored) == {entry.key for entry in report.entries}
    assert {entry.name for entry in report.entries} == {"t0", "t1", "t2", "t3", "t5"}, "t4 is empty"
    for entry in report.entries:
        original = tensors[int(entry.name[1:])]
        assert stored[entry.key].dtype == original.dtype and torch.equal(stored[entry.key], original)
    assert [entry.key for entry in report.entries][:3] == ["t0[0:5,0:3]", "t1[0:7]", "t2[]"]


def test_writing_a_box_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"t\[0:2\] is given twice"):
        write_shard(tmp_path / "x.safetensors", [StateShard.from_tensor("t", torch.zeros(2))] * 2)


def test_a_tensor_that_does_not_fit_is_named_before_any_is_changed(store, ranks):
    ranks.publish(store, 3)
    checkpoint = store.verify(3)
    unchanged = StateShard.from_tensor("model.embed.weight", torch.full((13, 4), 7.0))
    cases = {
        r"model.extra is missing in the checkpoint": StateShard.from_tensor("model.extra", torch.zeros(2)),
        r"model.head.weight has shape \[11, 3, 2\], not \[11, 3, 3\]": StateShard.from_tensor(
            "model.head.weight", torch.zeros(11, 3, 3)
        ),
        r"optimizer.step has dtype int64, not float32": StateShard.from_tensor("optimizer.step", torch.tensor(0.0)),
    }
    for reason, shard in cases.items():
        with pytest.raises(CheckpointError, match=reason):
            read_state(checkpoint, ShardedState([unchanged, shard]))
    assert (unchanged.tensor == 7).all()


def test_a_file_that_changes_after_verification_is_reported_as_corrupted(store, ranks):
    path = ranks.publish(store, 3, degree=1) / "rank-00000.safetensors"
    checkpoint = store.verify(3)
    state = ShardedState([StateShard.from_tensor("model.embed.weight", torch.zeros(13, 4))])
    valid = path.read_bytes()
    for content in (b"", valid[:50], valid[:-9], valid.replace(b'"shape":[13,4]', b'"shape":[4,13]')):
        path.write_bytes(content)
        with pytest.raises(CheckpointCorruptedError, match="rank-00000.safetensors"):
            read_state(checkpoint, state)
    path.unlink()
    with pytest.raises(CheckpointCorruptedError, match="rank-00000.safetensors"):
        read_state(checkpoint, state)


def measure_peak_mib(call):
    """Return the increase of this process's peak resident memory, mapped files included, while `call` runs."""

    def read_status(field):
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = read_status("VmRSS")
    call()
    return read_status("VmHWM") - before


def test_writing_makes_no_copy_and_reading_loads_only_the_required_rows(store):
    big = StateShard.from_tensor("w", torch.arange(2**24, dtype=torch.float32).reshape(2**14, 2**10))  # 64 MiB
    path = store.create_staging(1, 1) / get_shard_name(0)
    reports = []
    assert measure_peak_mib(lambda: reports.append(write_shard(path, [big]))) < 24
    store.publish(1, 1, reports, {}, lambda: None)
    checkpoint = store.verify(1)
    row = StateShard("w", big.shape, "float32", Box((9999, 0), (1, 2**10)), torch.zeros(1, 2**10))
    assert measure_peak_mib(lambda: read_state(checkpoint, ShardedState([row]))) < 24
    assert torch.equal(row.tensor[0], big.tensor[9999])


def test_a_failed_write_raises_oserror_and_leaves_no_file(tmp_path, monkeypatch):
    def raise_no_space(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", raise_no_space)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "x.safetensors", [StateShard.from_tensor("t", torch.zeros(4))])
    assert list(tmp_path.iterdir()) == []


def test_a_rank_cannot_recreate_a_discarded_directory(tmp_path):
    path = tmp_path / ".staging-step-00000001-g1" / "x.safetensors"
    with pytest.raises(FileNotFoundError):
        write_shard(path, [StateShard.from_tensor("t", torch.zeros(4))])
    assert list(tmp_path.iterdir()) == []
