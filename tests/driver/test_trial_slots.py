"""Room for the trials of a sweep: on a running cluster, on this machine, and in a Ray that the sweep starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import ray
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from raytrain_hpc.driver.ray_host import open_trial_slots
from raytrain_hpc.driver.trial_slots import count_slots
from raytrain_hpc.planner.topology import Node, Topology
from tests.warm_pool import SMALL_OVERRIDES, make_small_config


@pytest.mark.parametrize(
    "words, on_cpu, on_gpu",
    [
        (["cluster.workers=2"], 3, 2),  # on CPU, one for the readers of Ray Data
        (["cluster.workers=2", "data.engine=auto"], 3, 2),
        (["cluster.workers=2", "data.engine=local"], 2, 2),
        (["cluster.workers=2", "cluster.cpu_threads=4", "data.engine=local"], 8, 2),
        (["cluster.workers=2", "cluster.spares=1", "data.engine=local"], 3, 3),
        (["cluster.workers=auto", "data.engine=local"], 2, 8),
        (["cluster.workers=auto", "parallel.tp=3", "model.num_heads=6", "model.hidden_size=48"], 4, 6),
    ],
)
def test_slots_of_a_run(words: list[str], on_cpu: int, on_gpu: int) -> None:
    config = make_small_config("unused", "data.engine=ray", "train.global_batch_size=24", *words)
    nodes = (Node("0", "10.0.0.1", 4), Node("1", "10.0.0.2", 4))
    count = partial(count_slots, config, has_readers=True)
    assert count(topology=Topology(nodes, "cpu", "")) == on_cpu
    assert count(topology=Topology(nodes, "cuda", "h100")) == on_gpu


def test_trials_in_one_process_have_the_cpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_hpc.driver.trial_slots.count_usable_cpus", lambda: 6)
    config = make_small_config("unused", "cluster.workers=0", "cluster.cpu_threads=2", "cluster.device=cpu")
    with open_trial_slots(config, 1) as slots:
        assert (slots.free, slots.count(config), slots.words, slots.environment) == (6, 2, (), {})


def test_trials_share_the_running_cluster(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)  # trials are told where the Ray of the calling process is
    deadline = time.monotonic() + 30  # Ray releases the CPUs of an earlier test's actors when they have ended
    while ray.available_resources().get("CPU", 0) < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
    words = [*SMALL_OVERRIDES, "cluster.workers=4", f"run.dir={tmp_path}"]
    done = CliRunner().invoke(main, ["sweep", *words, "--over", "optimizer.lr=1e-3,1e-2"])
    assert done.exit_code == 0, done.output
    assert "2 at a time in 8 free slots; a trial takes " in done.stderr and "2 running" in done.stderr
    for metrics in tmp_path.glob("*/metrics.jsonl"):
        assert json.loads(metrics.read_text().splitlines()[-1])["elastic/world_size"] == 4


def test_the_ray_of_a_killed_sweep_lasts_until_its_trials_have_saved(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:  # a short path
        words = [*SMALL_OVERRIDES, "train.steps=100000", "data.engine=auto", "cluster.address=local"]
        command = [sys.executable, "-m", "raytrain_hpc", "sweep", *words, f"run.dir={tmp_path}", "--at-once", "2"]
        with (tmp_path / "output").open("wb") as output:
            sweep = subprocess.Popen(
                [*command, "--over", "optimizer.lr=1e-3,1e-2"],
                env={**os.environ, "RAY_TMPDIR": ray_dir},
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("*/metrics.jsonl"))) < 2:
            assert sweep.poll() is None and time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.1)
        sweep.kill()
        sweep.wait()
        deadline = time.monotonic() + 40
        while any(ray_dir in read_command_line(path) for path in Path("/proc").glob("[0-9]*")):  # Ray itself
            assert time.monotonic() < deadline
            time.sleep(0.1)
    for run_dir in (path.parent for path in tmp_path.glob("*/metrics.jsonl")):
        assert "stopped at step" in (run_dir / "output.log").read_text()
        assert json.loads((run_dir / "lease.json").read_text())["released"]
        assert list(run_dir.glob("checkpoints/step-*"))


def read_command_line(process: Path) -> str:
    """Return the command line of a process in /proc; "" if it has ended."""
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_sweep_starts_one_ray_for_all_trials(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:  # a short path
        words = [*SMALL_OVERRIDES, "data.engine=auto", "cluster.address=local", f"run.dir={tmp_path}"]
        command = [sys.executable, "-m", "raytrain_hpc", "sweep", *words, "--at-once", "2", "--json"]
        done = subprocess.run(
            [*command, "--over", "optimizer.lr=1e-3,1e-2"],
            env={**os.environ, "RAY_TMPDIR": ray_dir},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        sessions = [path for path in (Path(ray_dir) / "ray").glob("session_*") if not path.is_symlink()]
    assert len(sessions) == 1 and "2 running" in done.stderr
    assert [trial["state"] for trial in json.loads(done.stdout)] == ["done", "done"]
