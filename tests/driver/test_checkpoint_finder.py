"""The checkpoint that a run resumes from: the newest complete one of both tiers, on the nodes that there are."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.checkpoint_finder import CheckpointFinder
from raytrain_hpc.errors import CheckpointCorruptedError
from tests.checkpoint.conftest import FakeRanks

NODES = ("a", "b")  # rank 0 writes on node a, rank 1 on node b


class FakeNodes:
    """A run with checkpoints in both tiers, and workers on nodes whose disks are directories."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tmp_path, self._monkeypatch = tmp_path, monkeypatch
        (tmp_path / "run").mkdir()
        self.config = load_config(None, [f"run.dir={tmp_path}/run", "checkpoint.local_dir=$DISK"])
        self.store, self.catalog = CheckpointStore(tmp_path / "run" / "checkpoints"), LocalCatalog(tmp_path / "run")
        self.present = list(NODES)
        self.warnings: list[str] = []
        self.finder = CheckpointFinder(self.config, self.store, self.catalog, self.warnings.append)
        self.calls = 0

    def call_on_nodes(self, function: Callable[[], Any], timeout_s: float) -> dict[str, Any]:
        """Call a function as on each node."""
        assert timeout_s > 0
        self.calls += 1
        results = {}
        for node in self.present:
            with self._monkeypatch.context() as patch:
                patch.setenv("DISK", str(self._tmp_path / node))
                results[node] = function()
        return results

    def save_local(self, step: int, generation: int = 1) -> None:
        """Write the files of a step on the nodes, and add it to the catalog."""
        reports = [
            replace(report, host=f"host-{node}")
            for node, report in zip(NODES, FakeRanks.write(self.store, step, len(NODES), generation), strict=True)
        ]
        for node, report in zip(NODES, reports, strict=True):
            path = self.get_file(node, step, generation).parent
            path.mkdir(parents=True)
            shutil.copy(self.store.create_staging(step, generation) / report.file, path)
        self.store.discard(step, generation)
        self.catalog.publish(step, generation, reports, {}, lambda: None)

    def get_file(self, node: str, step: int, generation: int = 1) -> Path:
        """Return the file of a step on a node."""
        with self._monkeypatch.context() as patch:
            patch.setenv("DISK", str(self._tmp_path / node))
            root = LocalDirectory.open(self.config).root
        return root / f"step-{step:08d}-g{generation}" / f"rank-{NODES.index(node):05d}.safetensors"

    def find(self, *nodes_of_ranks: str) -> tuple[int, tuple[tuple[str, ...], ...] | None] | None:
        """Return step and local files by rank of the checkpoint that is found; None in place of files: in run.dir."""
        infos = [{"node_id": node} for node in nodes_of_ranks or self.present]
        point = self.finder.find(self, infos)  # type: ignore[arg-type]
        return None if point is None else (point.step, point.local and point.local.files_by_rank)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNodes:
    return FakeNodes(tmp_path, monkeypatch)


BOTH = (("rank-00000.safetensors",), ("rank-00001.safetensors",))


def test_the_newest_of_both_tiers_is_found_by_ranks_on_any_node(nodes) -> None:
    assert nodes.find() is None
    FakeRanks.publish(nodes.store, 8, degree=2)
    assert nodes.find() == (8, None) and nodes.calls == 0
    nodes.save_local(4)
    assert nodes.find() == (8, None) and nodes.calls == 0, "an older one is not looked for on the nodes"
    nodes.save_local(8)
    assert nodes.find() == (8, BOTH), "of the same step, the local one is faster to read"
    nodes.save_local(12)
    assert nodes.find("b", "a", "b") == (12, (BOTH[1], BOTH[0], BOTH[1]))
    nodes.save_local(12, generation=2)
    nodes.finder.find(nodes, [])
    assert nodes.finder.listed_local_names[-2:] == ("step-00000012-g1", "step-00000012-g2")
    assert not nodes.warnings


def test_a_node_that_is_gone_leaves_the_run_directory(nodes) -> None:
    FakeRanks.publish(nodes.store, 4, degree=2)
    nodes.save_local(8)
    nodes.present = ["a"]
    assert nodes.find() == (4, None)
    assert nodes.warnings == [
        "local checkpoint of step 8 skipped: rank-00001.safetensors was written on host-b, and is on no node of the run"
    ]
    nodes.present = ["a", "b"]
    assert nodes.find() == (8, BOTH), "it comes back"


@pytest.mark.parametrize("damage", ["bit flipped", "truncated", "deleted"])
def test_a_damaged_local_file_leaves_the_checkpoint_before(nodes, damage) -> None:
    FakeRanks.publish(nodes.store, 4, degree=2)
    nodes.save_local(8)
    nodes.save_local(12)
    file = nodes.get_file("b", 12)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content if damage == "bit flipped" else content[:-5])
    if damage == "deleted":
        file.unlink()
    assert nodes.find() == (8, BOTH)
    (line,) = nodes.warnings
    assert line.startswith(
        "local checkpoint of step 12 skipped" if damage == "deleted" else f"damaged checkpoint skipped: {file}: "
    )


def test_damage_in_the_run_directory_falls_back_to_older_local_checkpoints(nodes) -> None:
    nodes.save_local(8)
    for step in (4, 12):
        path = FakeRanks.publish(nodes.store, step, degree=2)
        (path / "rank-00001.safetensors").write_bytes(b"")
    assert nodes.find() == (8, BOTH)
    assert [line.split(":")[0] for line in nodes.warnings] == ["damaged checkpoint skipped"] * 2
    nodes.get_file("a", 8).unlink()
    with pytest.raises(CheckpointCorruptedError, match=r"none of its checkpoints is valid \(step-00000012, step-0"):
        nodes.find()


def test_what_a_rank_found_damaged_is_not_found_again(nodes) -> None:
    FakeRanks.publish(nodes.store, 4, degree=2)
    nodes.save_local(8)
    FakeRanks.publish(nodes.store, 12, degree=2)
    for _ in range(2):
        point = nodes.finder.find(nodes, [{"node_id": node} for node in NODES])
        nodes.finder.exclude(point, CheckpointCorruptedError("the block at byte 0 does not match"))
    assert nodes.find() == (4, None)
    reason = "the block at byte 0 does not match"
    assert set(nodes.warnings) == {
        f"damaged checkpoint skipped: {nodes.store.get_path(12)}: {reason}",
        f"damaged checkpoint skipped: {reason}",
    }
    FakeRanks.publish(nodes.store, 12, degree=2, generation=2)
    assert nodes.find() == (12, None), "it was saved again"


def test_a_local_checkpoint_that_a_faulty_rank_may_have_spoilt_is_skipped(nodes) -> None:
    """None was uploaded to the run directory yet."""
    for step in (8, 12):
        nodes.save_local(step)
    shutil.rmtree(nodes.store.root)
    nodes.store.distrust(8, 1, "rank 1, faulty device")
    assert nodes.find() == (8, BOTH)
    (line,) = nodes.warnings
    assert line.startswith("local checkpoint of step 12 skipped: saved after step 8, the last one known to be right")
    nodes.store.distrust(0, 1, "rank 1, corrupt")
    assert nodes.find() is None, "the run starts over"
    nodes.save_local(12, generation=2)
    assert nodes.find() == (12, BOTH)


def test_without_a_manifest_nothing_is_asked_of_the_nodes(nodes) -> None:
    """The catalog is damaged: its checkpoints are skipped."""
    nodes.save_local(8)
    (nodes.catalog.root / "step-00000008-g1" / "manifest.json").write_text("{}")
    assert nodes.find() is None and nodes.calls == 0 and "damaged checkpoint skipped" in nodes.warnings[0]
