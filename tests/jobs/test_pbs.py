"""The PBS script against stand-ins for PBS, MPI and Ray: what runs where, and what the time limit sets off."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.fake_commands import played

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
    yield played(tmp_path, STAND_INS) | pbs
    assert list((tmp_path / "tmp").iterdir()) == []  # the script cleans up after itself


def started(env: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([str(SCRIPT)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def log(env: dict[str, str]) -> list[str]:
    path = Path(env["LOG"])
    return path.read_text().splitlines() if path.exists() else []


def until_ready(env: dict[str, str]) -> None:
    deadline = time.monotonic() + 20
    while "ready" not in log(env):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [0, 2, 4])
def test_exit_code_is_the_drivers(env: dict[str, str], code: int) -> None:
    process = started(env | {"ENDS_WITH": str(code), "RESUBMIT": "cluster/pbs.sh"})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == code, output
    mpiexec, ray, *driver = log(env)
    assert mpiexec == "mpiexec -n 2 --ppn 1"
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 2 --num-cpus 64 -- bash -c")
    assert driver == ["driver", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a", "cluster.address=10.0.0.1:6379"]


def test_the_run_stops_before_the_limit_and_the_job_comes_again(env: dict[str, str]) -> None:
    process = started(env | {"WALLTIME": "00:05:02", "RESUBMIT": "cluster/pbs.sh"})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert log(env)[-2:] == ["driver saves", "qsub -V cluster/pbs.sh"]


@pytest.mark.parametrize(("stops_with", "resubmit"), [(3, ""), (0, "cluster/pbs.sh"), (4, "cluster/pbs.sh")])
def test_what_is_done_or_broken_does_not_come_again(env: dict[str, str], stops_with: int, resubmit: str) -> None:
    process = started(env | {"WALLTIME": "00:05:02", "RESUBMIT": resubmit, "STOPS_WITH": str(stops_with)})
    output, _ = process.communicate(timeout=30)
    assert process.returncode == stops_with, output
    assert log(env)[-1] == "driver saves"


def test_a_signal_of_the_scheduler_stops_the_run(env: dict[str, str]) -> None:
    process = started(env)
    until_ready(env)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 3, output
    assert log(env)[-1] == "driver saves"


def test_nothing_to_run_is_said(env: dict[str, str]) -> None:
    del env["RUN_ARGS"]
    process = started(env)
    output, _ = process.communicate(timeout=30)
    assert process.returncode != 0 and "set RUN_ARGS" in output
