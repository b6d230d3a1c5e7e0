"""The Slurm script with stand-ins for Slurm and Ray: its commands, and its actions at the time limit."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.fake_commands import install_fake_commands

SCRIPT = Path(__file__).parents[2] / "cluster" / "slurm.sh"
STAND_INS = {
    "srun": 'while [ "$1" != ray ]; do shift; done; shift; exec ray "$@"',
    "scontrol": 'echo "scontrol $*" >> "$LOG"',
}


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "4", "HEAD_IP": "10.0.0.1"}
    yield install_fake_commands(tmp_path, STAND_INS) | slurm
    assert list((tmp_path / "tmp").iterdir()) == []  # the script cleans up after itself


def start_job(env: dict[str, str]) -> subprocess.Popen[str]:
    words = [str(SCRIPT), "conf/llama3_8b.yaml", "run.dir=/shared/a b"]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("code", [0, 2, 4])
def test_exit_code_is_that_of_the_driver(env: dict[str, str], code: int) -> None:
    process = start_job(env | {"ENDS_WITH": str(code)})
    process.communicate(timeout=30)
    assert process.returncode == code
    ray, *driver = Path(env["LOG"]).read_text().splitlines()
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 3 --num-cpus 4 -- bash -c")
    assert driver == [
        "driver",
        "train",
        "conf/llama3_8b.yaml",
        "run.dir=/shared/a b",
        "cluster.address=10.0.0.1:6379",
    ]


def test_run_saves_and_requeues_near_the_limit(env: dict[str, str]) -> None:
    process = start_job(env)
    log = Path(env["LOG"])
    deadline = time.monotonic() + 20
    while not (log.exists() and "ready" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert log.read_text().splitlines()[-2:] == ["driver saves", "scontrol requeue 17"]
    assert "requeueing" in output
