"""Asynchronous checkpoint writing, and disks on which writing fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import threading

import pytest
import torch
from safetensors.torch import load_file

from raytrain_hpc.checkpoint import async_writer as writer_module
from raytrain_hpc.checkpoint.async_writer import AsyncCheckpointWriter
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.state.sharded_state import StateShard


@pytest.fixture
def slow_disk(monkeypatch):
    """An event that every write waits for."""
    is_ready = threading.Event()
    write = writer_module.write_shard

    def write_when_ready(path, shards):
        assert is_ready.wait(20)
        return write(path, shards)

    monkeypatch.setattr(writer_module, "write_shard", write_when_ready)
    yield is_ready
    is_ready.set()


def test_the_file_has_the_content_at_the_time_of_the_call(tmp_path, slow_disk):
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    blocked_s = writer.save([StateShard.from_tensor("w", weight)], tmp_path / "a.safetensors", 1, wait=False)
    with torch.no_grad():
        weight.fill_(-1)
    assert not (tmp_path / "a.safetensors").exists() and reports == [] and blocked_s < 10
    assert writer.finish(timeout=0.01) is False
    slow_disk.set()
    assert writer.finish() is True
    assert torch.equal(load_file(tmp_path / "a.safetensors")["w[0:2,0:3]"], torch.arange(6.0).reshape(2, 3))
    (report,) = reports
    report = json.loads(json.dumps(report))
    assert report["step"] == 1 and ShardReport.from_json(report["shard"]).file == "a.safetensors"


def test_a_second_save_waits_for_the_first_and_reuses_the_buffer(tmp_path, slow_disk):
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    shards = [StateShard.from_tensor("w", torch.zeros(1000)), StateShard.from_tensor("step", torch.tensor(1))]
    writer.save(shards, tmp_path / "a", 1, wait=False)
    address = writer._buffer.block.data_ptr()
    threading.Timer(0.2, slow_disk.set).start()
    shards[0].tensor.fill_(2)
    blocked_s = writer.save(shards, tmp_path / "b", 2, wait=False)
    assert blocked_s >= 0.1 and reports[0]["step"] == 1
    assert writer._buffer.block.data_ptr() == address
    writer.finish()
    assert [report["step"] for report in reports] == [1, 2]
    assert load_file(tmp_path / "a")["w[0:1000]"].sum() == 0 and load_file(tmp_path / "b")["w[0:1000]"].sum() == 2000


def test_the_buffer_follows_a_change_of_layout(tmp_path):
    writer = AsyncCheckpointWriter(lambda report: None)
    shards = [StateShard.from_tensor("w", torch.zeros(10)), StateShard.from_tensor("v", torch.zeros(5))]
    writer.save(shards, tmp_path / "a", 1, wait=True)
    writer.save([StateShard.from_tensor("w", torch.ones(20))], tmp_path / "b", 2, wait=True)
    assert writer._buffer.block.numel() == 128, "bytes of 20 floats, padded to a multiple of 64"
    assert load_file(tmp_path / "b")["w[0:20]"].sum() == 20


def test_save_with_wait_returns_when_the_file_is_on_disk(tmp_path):
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    writer.save([StateShard.from_tensor("w", torch.ones(3))], tmp_path / "a", 1, wait=True)
    assert (tmp_path / "a").stat().st_size == reports[0]["shard"]["checksum"]["bytes"]


def test_an_oserror_is_reported_and_the_writer_stays_usable(tmp_path, monkeypatch):
    reports = []
    writer = AsyncCheckpointWriter(reports.append)

    def raise_no_space(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", raise_no_space)
        writer.save([StateShard.from_tensor("w", torch.ones(3))], tmp_path / "a", 1, wait=True)
    (tmp_path / "file").write_text("")
    writer.save([StateShard.from_tensor("w", torch.ones(3))], tmp_path / "file" / "b", 2, wait=True)
    writer.save([StateShard.from_tensor("w", torch.ones(3))], tmp_path / "c", 3, wait=True)
    assert [report.get("error") for report in reports] == [
        f"{tmp_path}/a cannot be written: No space left on device",
        f"{tmp_path}/file/b cannot be written: Not a directory",
        None,
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "file"]


def test_any_other_exception_is_reported_and_raised_by_the_next_call(tmp_path):
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    writer.save([StateShard.from_tensor("w", torch.ones(3))] * 2, tmp_path / "a", 1, wait=False)
    with pytest.raises(ValueError, match="given twice"):
        writer.finish()
    assert "given twice" in reports[0]["error"]
    assert writer.finish()

    def fail(_):
        raise RuntimeError("report failed")

    writer = AsyncCheckpointWriter(fail)
    with pytest.raises(RuntimeError, match="report failed"):
        writer.save([StateShard.from_tensor("w", torch.ones(3))], tmp_path / "b", 2, wait=True)


def write_too_large_a_file(root):
    """Write a small, a too large and another small file. Return the error reported for the large one."""
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    for step, elements in ((1, 1000), (2, 2**20), (3, 2000)):
        writer.save([StateShard.from_tensor("w", torch.ones(elements))], root / str(step), step, wait=True)
    assert ["error" in report for report in reports] == [False, True, False], "the next small file fits again"
    assert sorted(path.name for path in root.iterdir()) == ["1", "3"], "the partial file is removed"
    return reports[1]["error"]


def test_a_file_size_limit_is_reported(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        assert write_too_large_a_file(tmp_path) == f"{tmp_path}/2 cannot be written: File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_file_system_is_reported(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small file system is not permitted here: {mounted.stderr.strip()}")
    try:
        assert write_too_large_a_file(tmp_path) == f"{tmp_path}/2 cannot be written: No space left on device"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
