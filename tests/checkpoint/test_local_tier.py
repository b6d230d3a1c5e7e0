"""Checkpoints in node-local storage: the files on a node, their catalog, and their upload to the run directory."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raytrain_hpc.checkpoint import shard_upload
from raytrain_hpc.checkpoint.async_writer import AsyncCheckpointWriter
from raytrain_hpc.checkpoint.local_catalog import HOSTS_KEY, LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.shard_io import open_shards, read_state
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


def make_state(value: float, size: int = 1000) -> list[StateShard]:
    return [StateShard.from_tensor("w", torch.full((size,), value))]


def write_local(directory: LocalDirectory, step: int, generation: int = 1) -> None:
    (directory.create(step, generation) / "rank-00000.safetensors").write_text("content")


def test_a_node_keeps_the_newest_checkpoints_and_those_of_the_catalog(tmp_path) -> None:
    directory = LocalDirectory(tmp_path / "run")
    assert directory.list_names() == []
    for step, generation in ((4, 1), (8, 1), (8, 2), (12, 2), (16, 1)):
        write_local(directory, step, generation)
    directory.prune(16, keep=2)
    assert sorted(directory.list_names()) == ["step-00000008-g1", "step-00000008-g2", "step-00000012-g2"] + [
        "step-00000016-g1"
    ]
    directory.remove_leftovers(["step-00000012-g2"], generation=2)
    assert sorted(directory.list_names()) == ["step-00000008-g2", "step-00000012-g2"], "generation 2 is still writing"
    directory.remove_leftovers(["step-00000012-g2"], generation=3)
    assert directory.list_names() == ["step-00000012-g2"]
    directory.remove()
    assert not directory.root.exists()


def test_a_node_keeps_the_newest_verified_checkpoint(tmp_path) -> None:
    directory = LocalDirectory(tmp_path / "run")
    for step in (4, 8, 12, 16, 20):
        write_local(directory, step)
    directory.prune(20, keep=1, fallback_steps=[10])
    assert sorted(directory.list_names()) == ["step-00000008-g1", "step-00000016-g1", "step-00000020-g1"]


def test_the_directory_of_a_run_on_a_node(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DISK", str(tmp_path))
    roots = [
        LocalDirectory.open(load_config(None, [f"run.dir={run_dir}", "checkpoint.local_dir=$DISK/tier"])).root
        for run_dir in ("/runs/demo", "/runs/demo/", "/other/demo", "s3://bucket/runs/demo")
    ]
    assert roots[0] == roots[1] and len(set(roots)) == 3
    assert all(root.parent == tmp_path / "tier" and root.name.startswith("demo-") for root in roots)
    monkeypatch.delenv("DISK")
    with pytest.raises(CheckpointError, match=r"local_dir=\$DISK/tier: .*set the variable on all nodes"):
        LocalDirectory.open(load_config(None, ["checkpoint.local_dir=$DISK/tier"]))


def publish(catalog: LocalCatalog, ranks, store, step: int, generation: int = 1) -> Path:
    reports = ranks.write(store, step, 2, generation)
    return catalog.publish(step, generation, reports, {"data": step}, lambda: None)


def test_the_catalog_drops_old_and_abandoned_checkpoints(tmp_path, ranks, store) -> None:
    catalog = LocalCatalog(tmp_path)
    for step in (4, 8, 12, 16):
        publish(catalog, ranks, store, step)
    assert catalog.prune(2) == [catalog.root / "step-00000004-g1", catalog.root / "step-00000008-g1"]
    publish(catalog, ranks, store, 12, generation=3)  # a generation that resumed from step 8
    catalog.prune(2)
    assert catalog.list_names() == ["step-00000012-g1", "step-00000012-g3"], "step 16 was left behind"
    assert catalog.list_steps() == [12, 12]
    with pytest.raises(CheckpointError, match="another driver has published it"):
        catalog.publish(12, 3, ranks.write(store, 12, 2, 3), {"data": "other"}, lambda: None)
    assert catalog.read("step-00000012-g3").meta == {
        "data": 12,
        HOSTS_KEY: {"rank-00000.safetensors": "", "rank-00001.safetensors": ""},
    }
    catalog.clear()
    assert catalog.list_names() == []


def test_the_catalog_keeps_what_is_trusted_and_verified(tmp_path, ranks, store) -> None:
    catalog = LocalCatalog(tmp_path, store.find_distrust)
    ranks.publish(store, 4)
    for step in (4, 8, 12, 16):
        publish(catalog, ranks, store, step)
    assert [path.name for path in catalog.prune(2, [6])] == ["step-00000008-g1"]
    store.distrust(6, 1, "rank 1, faulty device")
    publish(catalog, ranks, store, 14, generation=2)
    assert [path.name for path in catalog.prune(2, [6])] == ["step-00000012-g1", "step-00000016-g1"]
    assert catalog.list_names() == ["step-00000004-g1", "step-00000014-g2"]
    store.distrust(0, 2, "rank 1, corrupt")
    assert catalog.prune(1) == [], "nothing is trusted"


def test_a_checkpoint_with_a_missing_rank_is_refused(tmp_path, ranks, store) -> None:
    with pytest.raises(CheckpointError, match="local checkpoint of step 4 cannot be published: no rank has written"):
        LocalCatalog(tmp_path).publish(4, 1, ranks.write(store, 4, 2)[:1], {}, lambda: None)
    assert LocalCatalog(tmp_path).list_names() == []


def test_files_of_a_node_are_checked_and_opened(tmp_path, ranks, store) -> None:
    checkpoint_path = publish(LocalCatalog(tmp_path), ranks, store, 4)
    checkpoint = LocalCatalog(tmp_path).read(checkpoint_path.name)
    directory = LocalDirectory(tmp_path / "node")
    (tmp_path / "node").mkdir()
    store.create_staging(4, 1).rename(directory.root / checkpoint_path.name)
    files = list(checkpoint.files)
    assert directory.check_files(checkpoint_path.name, checkpoint.files, read=True) == dict.fromkeys(files, "")
    (expected,) = ranks.shard(ranks.make_tensors(4), 1)
    loaded = ShardedState(
        StateShard(s.name, s.shape, s.dtype, s.box, torch.zeros_like(s.tensor)) for s in expected.shards
    )
    opened = open_shards(checkpoint, directory.root / checkpoint_path.name, files)
    reshard_state(loaded, opened, None, torch.device("cpu"))
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(loaded, expected, strict=True))
    damaged = directory.root / checkpoint_path.name / files[1]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert directory.check_files(checkpoint_path.name, checkpoint.files, read=False) == dict.fromkeys(files, "")
    problems = directory.check_files(checkpoint_path.name, checkpoint.files, read=True)
    assert not problems[files[0]] and "checksum is" in problems[files[1]]
    damaged.write_bytes(content[:-7])
    assert "expected" in directory.check_files(checkpoint_path.name, checkpoint.files, read=False)[files[1]]
    with pytest.raises(CheckpointCorruptedError, match="cannot be read"):
        open_shards(checkpoint, directory.root / checkpoint_path.name, files)
    damaged.unlink()
    assert list(directory.check_files(checkpoint_path.name, checkpoint.files, read=True)) == files[:1]


@pytest.fixture
def slow_upload(monkeypatch):
    """An event that every upload waits for."""
    may_upload, copy = threading.Event(), shard_upload.copy_file

    def copy_when_allowed(*arguments):
        assert may_upload.wait(20)
        copy(*arguments)

    monkeypatch.setattr(shard_upload, "copy_file", copy_when_allowed)
    yield may_upload
    may_upload.set()


def test_a_slow_upload_delays_no_local_checkpoint_and_survives_the_deletion_of_its_file(tmp_path, slow_upload) -> None:
    reports = []
    writer = AsyncCheckpointWriter(reports.append, "host")
    writer.save(make_state(1.0), tmp_path / "run-1", 1, wait=False, local_path=tmp_path / "local-1")
    writer.save(make_state(2.0), None, 2, wait=False, local_path=tmp_path / "local-2")
    while len(reports) < 2:
        assert writer.finish(timeout=0.01) is False, "the upload is in progress"
    assert [(report["step"], report["tier"]) for report in reports] == [(1, "local"), (2, "local")]
    assert load_file(tmp_path / "local-2")["w[0:1000]"].sum() == 2000
    (tmp_path / "local-1").unlink()
    slow_upload.set()
    assert writer.finish()
    assert load_file(tmp_path / "run-1")["w[0:1000]"].sum() == 1000
    local, uploaded = (ShardReport.from_json(reports[number]["shard"]) for number in (0, 2))
    assert (reports[2]["step"], reports[2]["tier"]) == (1, "run") and local.checksum == uploaded.checksum
    assert (local.host, uploaded.host) == ("host", "")


def test_a_checkpoint_is_uploaded_later_on_request(tmp_path) -> None:
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    writer.save(make_state(1.0), None, 1, wait=False, local_path=tmp_path / "local")
    writer.upload_last(tmp_path / "run", 1)
    assert writer.finish() and load_file(tmp_path / "run")["w[0:1000]"].sum() == 1000
    assert [report["tier"] for report in reports] == ["local", "run"]


def test_faults_of_local_storage(tmp_path, slow_upload) -> None:
    """With a full local disk, the run directory gets the file from memory; a damaged local file is not uploaded."""
    reports = []
    writer = AsyncCheckpointWriter(reports.append)
    writer.save(make_state(1.0), tmp_path / "run-1", 1, wait=True, local_path=tmp_path / "missing" / "local")
    assert "cannot be written: No such file or directory" in reports[0]["error"] and reports[0]["tier"] == "local"
    assert reports[1]["tier"] == "run" and load_file(tmp_path / "run-1")["w[0:1000]"].sum() == 1000
    writer.save(make_state(2.0), tmp_path / "run-2", 2, wait=False, local_path=tmp_path / "local")
    while len(reports) < 3:
        assert writer.finish(timeout=0.01) is False
    with (tmp_path / "local").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    slow_upload.set()
    assert writer.finish() and "was changed after it was written" in reports[3]["error"]
    assert not (tmp_path / "run-2").exists()
    writer.save(make_state(3.0), None, 3, wait=True, local_path=tmp_path / "missing" / "local")
    writer.upload_last(tmp_path / "run-3", 3)
    assert "there is no local file of this step" in reports[5]["error"]


def test_a_local_manifest_reads_like_one_of_the_run_directory(tmp_path, ranks, store) -> None:
    """The same files in both tiers give the same state."""
    reports = ranks.write(store, 4, 3)
    name = LocalCatalog(tmp_path).publish(4, 1, reports, {}, lambda: None).name
    local = LocalCatalog(tmp_path).read(name)
    published = store.publish(4, 1, reports, {}, lambda: None)
    checkpoint = store.verify(4)
    assert local.index == checkpoint.index and local.files == checkpoint.files
    states = [ranks.shard(ranks.make_tensors(0), 2) for _ in range(2)]
    opened = open_shards(local, published, list(local.files))
    for rank in range(2):
        read_state(checkpoint, states[0][rank])
        reshard_state(states[1][rank], opened, None, torch.device("cpu"))
        assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(states[0][rank], states[1][rank], strict=True))
