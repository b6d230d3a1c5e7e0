"""Runs with node-local checkpoints: a killed driver, damaged files, other layouts, and two nodes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.runtime.worker_spec import LocalCheckpoint
from tests.driver.cli_process import WORDS, CliRunner, curve_point, read_curve
from tests.driver.test_two_nodes import COMPARED_STEPS, ELASTIC, read_lines
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

KILL_AFTER_STEP = """
import os, signal
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def handle_step(self, metrics):
    real(self, metrics)
    if metrics["step"] == {step}:
        self.wait_for_checkpoints()
        os.kill(os.getpid(), signal.SIGKILL)
RunRecorder._handle_step = handle_step
"""


class Run:
    """A run in which every fourth step is saved locally, and every twelfth in the run directory."""

    def __init__(self, cli: CliRunner, directory: Path) -> None:
        self._cli, self._out, self.run_dir, self.local_dir = (
            cli,
            directory / "out",
            directory / "run",
            directory / "nvme",
        )

    def train(self, *words: str, kill_after: int = 0) -> tuple[int, str]:
        """Train; return the exit code and the output."""
        tier = [f"checkpoint.local_dir={self.local_dir}", "checkpoint.upload_interval=12"]
        patch = KILL_AFTER_STEP.format(step=kill_after) if kill_after else ""
        return self._cli.run(self._out, "train", *WORDS, f"run.dir={self.run_dir}", *tier, *words, patch=patch)

    def list_local(self) -> list[str]:
        """Return the names of the checkpoints on the node."""
        return sorted(path.name for path in self.local_dir.glob("run-*/step-*"))

    def list_published(self) -> list[str]:
        """Return the names of the checkpoints in the run directory."""
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step-*"))


def test_a_killed_run_continues_from_the_newest_local_checkpoint(cli, reference_curve, tmp_path) -> None:
    run = Run(cli, tmp_path)
    assert run.train(kill_after=18)[0] == -signal.SIGKILL
    assert run.list_published() == ["step-00000012"]
    assert run.list_local() == ["step-00000008-g1", "step-00000012-g1", "step-00000016-g1"]
    (partial,) = run.local_dir.glob("run-*")
    (partial / "step-00000020-g1").mkdir()
    (partial / "step-00000020-g1" / "rank-00000.safetensors").write_bytes(b"partial")
    code, output = run.train(kill_after=17)
    assert code == -9 and "resumed from local checkpoint step-00000016-g1: step 16 of 24" in output, output
    assert run.list_local() == ["step-00000012-g1", "step-00000016-g1"], "the partial one is a leftover"
    code, output = run.train()
    assert code == 0 and "resumed from local checkpoint step-00000016-g1" in output and "skipped" not in output, output
    assert read_curve(run.run_dir) == reference_curve
    assert run.list_published() == ["step-00000012", "step-00000024"] and not run.list_local()
    assert not LocalCatalog(run.run_dir).list_names(), "the last one is in the run directory"
    assert "already trained" in run.train()[1]


def test_damaged_and_lost_local_checkpoints_leave_the_run_directory(cli, reference_curve, tmp_path) -> None:
    run = Run(cli, tmp_path)
    assert run.train(kill_after=22)[0] == -signal.SIGKILL
    (file,) = run.local_dir.glob("run-*/step-00000020-g1/*")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    shutil.rmtree(file.parents[1] / "step-00000016-g1")
    code, output = run.train()
    assert code == 0 and f"damaged checkpoint skipped: {file}: checksum is" in output, output
    assert "local checkpoint of step 16 skipped: rank-00000.safetensors was written on" in output
    assert f"resumed from {run.run_dir}/checkpoints/step-00000012: step 12 of 24" in output
    assert read_curve(run.run_dir) == reference_curve


def test_without_a_local_disk_the_run_directory_gets_its_checkpoints(cli, reference_curve, tmp_path) -> None:
    run = Run(cli, tmp_path)
    run.local_dir.write_text("a file is in the way")
    code, output = run.train()
    assert code == 0 and read_curve(run.run_dir) == reference_curve, output
    assert run.list_published() == ["step-00000012", "step-00000024"]
    assert f"alarm: local checkpoint of step 16 not saved: rank 0: {run.local_dir}" in output


LAYOUT_WORDS = ["model.dropout=0.1", "train.steps=8", "train.micro_batch_size=1", "checkpoint.interval=2"]
ZERO3, PIPELINE = ["cluster.workers=4", "parallel.zero=3"], ["cluster.workers=4", "parallel.tp=2", "parallel.pp=2"]
LAYOUTS = {
    "4 ranks, ZeRO-3": (ZERO3, ZERO3),
    "4 ranks, ZeRO-3, then 2, DDP": (ZERO3, ["cluster.workers=2"]),
    "tp=2, pp=2, then 3 ranks, ZeRO-2": (PIPELINE, ["cluster.workers=3", "parallel.zero=2"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_files_give_the_same_bits_as_the_run_directory(pool: WarmPool, tmp_path, layout) -> None:
    """Each rank reads the files on its node, and receives the rest from the others."""
    saved_in, resumed_in = (
        [*LAYOUT_WORDS, *words, f"checkpoint.local_dir={tmp_path}/nvme"] for words in LAYOUTS[layout]
    )
    config = make_small_config(tmp_path / "run", *saved_in)
    pool.train(config, steps_to=4)
    saved = tmp_path / "saved"
    shutil.copytree(LocalDirectory.open(config).root, saved)
    config, catalog = make_small_config(tmp_path / "run", *resumed_in), LocalCatalog(tmp_path / "run")
    (name,) = [name for name in catalog.list_names() if name.startswith("step-00000004")]
    files = sorted(path.name for path in (saved / name).iterdir())
    from_run_directory = pool.train(config, resume_step=4)[0]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    shutil.copytree(saved, LocalDirectory.open(config).root, dirs_exist_ok=True)
    # The last rank is on a node of its own, with one of the files; no other rank's node has it.
    files_by_rank = [tuple(files[1:])] * (int(config.cluster.workers) - 1) + [(files[0],)]
    from_files = pool.train(config, resume_step=4, local_checkpoint=LocalCheckpoint(name, tuple(files_by_rank)))[0]
    curves = [
        [curve_point(metrics) for metrics in get_step_metrics(records)] for records in (from_run_directory, from_files)
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 4


@pytest.mark.timeout(240)
@pytest.mark.skipif(
    ray.__version__.startswith("2.50."), reason="a driver of Ray 2.50 may connect to either of two nodes of one host"
)
def test_two_nodes_continue_from_their_own_disks(pool: WarmPool, tmp_path: Path) -> None:
    """The driver is killed between two checkpoints of the run directory; each node has the files of its ranks."""
    run_dir = tmp_path / "run"
    words = [*ELASTIC, "parallel.zero=3", "cluster.workers=2", "lr_scheduler.name=constant", "checkpoint.interval=2"]
    tier = [f"checkpoint.local_dir={tmp_path}/disk-$NODE_NUMBER", "checkpoint.upload_interval=100"]
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words, *tier]
    reference = [curve_point(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *words))[0])]
    cluster = TwoNodeCluster(cpus=(1, 1))
    try:
        process = subprocess.Popen([*command, *throttle(2)], env=cluster.env, cwd=tmp_path, stdout=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while len(LocalCatalog(run_dir).list_names()) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
        process.communicate()
        assert {path.parent.name for path in tmp_path.glob("disk-*/run-*")} == {"disk-1", "disk-2"}
        assert not list((run_dir / "checkpoints").glob("step-*"))
        resumed = subprocess.run(
            command, env=cluster.env, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
        )
    finally:
        cluster.close()
    assert resumed.returncode == 0 and "resumed from local checkpoint step-" in resumed.stdout, resumed.stdout
    curve = {line["step"]: curve_point(line) for line in read_lines(run_dir)}
    assert [curve[step] for step in range(1, COMPARED_STEPS + 1)] == reference
    assert not list(tmp_path.glob("disk-*/run-*")), "deleted at the end of the run"
    assert json.loads((run_dir / "result.json").read_text())["checkpoint"].endswith(f"step-{COMPARED_STEPS:08d}")
