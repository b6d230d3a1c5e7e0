"""The PBS script with stand-ins for PBS, MPI and Ray: its commands, and its actions at the time limit."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.fake_commands import install_fake_commands

SCRIPT = Path(__file__).parents[2] / "cluster" / "pbs.sh"
STAND_INS = {
    "mpiexec": 'echo "mpiexec $1 $2 $3 $4" >> "$LOG"; while [ "$1" != ray ]; do shift; done; shift; exec ray "$@"',
    "qstat": 'echo "    Resource_List.walltime = ${WALLTIME:-06:00:00}"',
    "qsub": 'echo "qsub $*" >> "$LOG"',
}


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "nodes").write_text("x1\nx1\nx1\nx1\nx2\nx2\nx2\nx2\n")
    pbs = {"PBS_JOBID": "17.pbs", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    pbs |= {"NCPUS": "64", "HEAD_IP": "10.0.0.1", "RUN_ARGS": "conf/llama3_8b.yaml run.dir=/shared/a"}
    yield install_fake_commands(tmp_path, STAND_INS) | pbs
    assert list((tmp_path / "tmp").iterdir()) == []  # the script cleans up after itself


def start_job(env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([str(SCRIPT)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_log(env: dict[str, str]) -> list[str]:
    path = Path(env["LOG"])
    return path.read_text().splitlines() if path.exists() else []


def wait_until_ready(env: dict[str, str]) -> None:
    deadline = time.monotonic() + 20
    while "ready" not in read_log(env):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 4])
def test_exit_code_is_that_of_the_driver(env: dict[str, str], code: int) -> None:
    process = start_job(env | {"ENDS_WITH": str(code), "RESUBMIT": "cluster/pbs.sh"})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    mpiexec, ray, *driver = read_log(env)
    assert mpiexec == "mpiexec -n 2 --ppn 1"
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 2 --num-cpus 64 -- bash -c")
    assert driver == ["driver", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a", "cluster.address=10.0.0.1:6379"]


def test_run_stops_before_the_limit_and_is_resubmitted(env: dict[str, str]) -> None:
    process = start_job(env | {"WALLTIME": "00:05:02", "RESUBMIT": "cluster/pbs.sh"})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert read_log(env)[-2:] == ["driver saves", "qsub -V cluster/pbs.sh"]


@pytest.mark.parametrize(("stops_with", "resubmit"), [(3, ""), (0, "cluster/pbs.sh"), (4, "cluster/pbs.sh")])
def test_finished_or_failed_run_is_not_resubmitted(env: dict[str, str], stops_with: int, resubmit: str) -> None:
    process = start_job(env | {"WALLTIME": "00:05:02", "RESUBMIT": resubmit, "STOPS_WITH": str(stops_with)})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == stops_with, output
    assert read_log(env)[-1] == "driver saves"


def test_scheduler_signal_stops_the_run(env: dict[str, str]) -> None:
    process = start_job(env)
    wait_until_ready(env)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 3, output
    assert read_log(env)[-1] == "driver saves"


def test_missing_arguments_are_reported(env: dict[str, str]) -> None:
    del env["RUN_ARGS"]
    process = start_job(env)
    output, _ = process.communicate(timeout=30)
    assert process.returncode != 0 and "set RUN_ARGS" in output
