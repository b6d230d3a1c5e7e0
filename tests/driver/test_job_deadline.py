"""Deadlines from settings and job variables, the job's start from real processes, and a run that stops in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from raytrain_hpc.cli.main import main
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import deadline_monitor
from raytrain_hpc.driver.deadline_monitor import DeadlineMonitor
from raytrain_hpc.driver.job_deadline import find_deadline, find_job_end
from raytrain_hpc.elastic.deadline import Deadline
from raytrain_hpc.errors import ConfigError
from tests.warm_pool import SMALL_OVERRIDES

SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": "4000000000"}


def find(setting: str, environment: dict[str, str], start: float = 0.0) -> Deadline | None:
    return find_deadline(load_config(None, [f"run.deadline={setting}"]), environment, start)


def test_setting_overrides_the_end_of_the_job() -> None:
    now = time.time()
    assert find("auto", SLURM) == Deadline(4e9, "SLURM_JOB_END_TIME")
    assert find("none", SLURM) is None
    assert find("2h", SLURM, now) == Deadline(now + 7200, "run.deadline=2h")
    tomorrow = (datetime.now() + timedelta(days=1)).isoformat(timespec="seconds")
    assert find(tomorrow, SLURM) == Deadline(datetime.fromisoformat(tomorrow).timestamp(), f"run.deadline={tomorrow}")


@pytest.mark.parametrize("value", ["", "0", "soon", "-1", "1000"])
def test_useless_end_of_a_job_is_ignored(value: str) -> None:
    """The last one has passed: the variable is that of another job, or the job was extended."""
    assert find("auto", {"SLURM_JOB_END_TIME": value}) is None


def test_time_that_has_passed_is_refused() -> None:
    with pytest.raises(ConfigError, match="run.deadline='2020-01-01' .load_config.: has passed"):
        find("2020-01-01", SLURM)


def test_pbs_walltime_counts_from_the_first_process_of_the_job() -> None:
    job = {"PBS_JOBID": f"{os.getpid()}.test", "PBS_WALLTIME": "3600"}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | job) as script:
        try:
            started = psutil.Process(script.pid).create_time()
            time.sleep(0.3)
            program = (
                "import os; from raytrain_hpc.driver.job_deadline import find_job_end; "
                "print(find_job_end(os.environ).unix, find_job_end(os.environ).origin)"
            )
            found = subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | job,
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout.split()
        finally:
            script.kill()
    assert float(found[0]) == started + 3600 and found[1] == "PBS_WALLTIME"
    assert find_job_end({"PBS_WALLTIME": "3600"}) is None and find_job_end({"PBS_JOBID": "9"}) is None


def test_slowest_recent_step_and_checkpoint_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline_monitor, "_POLL_INTERVAL_S", 0.01)
    lines: list[str] = []
    stop = threading.Event()
    monitor = DeadlineMonitor(Deadline(time.time() + 60, "test"), 1.0, stop, lines.append)
    for seconds in (100.0, *[1.0] * 15, 2.0):  # the first step is not recent any more
        monitor.record_step(seconds)
    with monitor.watch():
        assert not stop.wait(0.1), "19 s are needed, 60 s are left"
        monitor.record_save(21.0)
        assert stop.wait(5), "61 s are needed"
    assert lines[0].startswith("ends by ") and "(test)" in lines[0]
    assert len(lines) == 2 and "61 s = 2 steps of 2 s + 2 x 21 s" in lines[1] and "measured" not in lines[1]


def test_run_without_a_deadline_is_not_watched() -> None:
    before = threading.active_count()
    with DeadlineMonitor(None, 1.0, threading.Event(), print).watch():
        assert threading.active_count() == before


def test_run_saves_and_stops_before_the_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = int(time.time()) + 20
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    words = ["train", *SMALL_OVERRIDES, f"run.dir={tmp_path}", "cluster.workers=0", "checkpoint.interval=5"]
    with pytest.raises(SystemExit) as exit_info:
        main([*words, "train.steps=1000000"])
    assert exit_info.value.code == 3 and time.time() < end
    result = json.loads((tmp_path / "result.json").read_text())
    steps = result["steps"]
    assert result["outcome"] == "stopped" and result["checkpoint"] == f"{tmp_path}/checkpoints/step-{steps:08d}"
    output = capsys.readouterr().out
    at = datetime.fromtimestamp(end).strftime("%Y-%m-%d %H:%M:%S")
    assert f"ends by {at} in " in output and f"deadline {at} in " in output and "no checkpoint measured" not in output
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    with pytest.raises(SystemExit) as exit_info:
        main([*words, f"train.steps={steps + 1}"])
    assert not exit_info.value.code
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(lines)) == list(range(1, steps + 2))
