"""The PBS script with stand-ins for PBS, MPI and Ray: its commands, the end of the job, and what follows the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_hpc.config.loader import load_config
from tests.jobs.fake_commands import ROOT, install_fake_commands, run_job

SCRIPT = ROOT / "cluster" / "pbs.sh"
STAND_INS = {
    "mpiexec": """
        echo "mpiexec $1 $2 $3 $4" >> "$LOG"; while [ "$1" != ray ]; do shift; done; shift; ray "$@"; exit 143""",
    "qstat": 'echo "    Resource_List.walltime = 02:30:10"',
    "qsub": 'echo "qsub $*" >> "$LOG"',
}


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "nodes").write_text("x1\nx1\nx1\nx1\nx2\nx2\nx2\nx2\n")
    pbs = {"PBS_JOBID": f"{tmp_path.name}.pbs", "PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_O_WORKDIR": str(tmp_path)}
    pbs |= {"NCPUS": "64", "HEAD_IP": "10.0.0.1", "RUN_ARGS": "conf/llama3_8b.yaml run.dir=/shared/a"}
    yield install_fake_commands(tmp_path, STAND_INS) | pbs
    assert list((tmp_path / "tmp").iterdir()) == []  # the script cleans up after itself


@pytest.mark.parametrize("code", [0, 2, 4])
def test_exit_code_is_that_of_the_driver(env: dict[str, str], code: int) -> None:
    returned, output, log = run_job(SCRIPT, env | {"ENDS_WITH": str(code), "RESUBMIT": "cluster/pbs.sh"})
    assert returned == code, output
    mpiexec, ray, *driver = log
    assert mpiexec == "mpiexec -n 2 --ppn 1"
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 2 --num-cpus 64 -- bash -c")
    assert driver == ["driver", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a", "cluster.address=10.0.0.1:6379"]


@pytest.mark.parametrize(("walltime", "limit_s"), [("", 9010), ("7200", 7200)])
def test_end_of_the_job_counts_from_the_start_of_the_script(env: dict[str, str], walltime: str, limit_s: int) -> None:
    began = time.time()
    returned, output, _ = run_job(SCRIPT, env | {"PBS_WALLTIME": walltime})
    assert returned == 0, output
    start = float(Path(env["JOB_END"]).read_text()) - limit_s
    assert began - 1.1 <= start <= began + 2  # the kernel reports the time of booting in whole seconds


def test_run_that_stopped_in_time_is_submitted_again(env: dict[str, str]) -> None:
    returned, output, log = run_job(SCRIPT, env | {"ENDS_WITH": "3", "RESUBMIT": "cluster/pbs.sh"})
    assert (returned, log[-1]) == (0, "qsub -V cluster/pbs.sh"), output
    Path(env["LOG"]).write_text("")
    returned, _, log = run_job(SCRIPT, env | {"ENDS_WITH": "3"})
    assert returned == 3 and not any(line.startswith("qsub") for line in log)


def test_missing_arguments_are_reported(env: dict[str, str]) -> None:
    del env["RUN_ARGS"]
    returned, output, _ = run_job(SCRIPT, env)
    assert returned != 0 and "set RUN_ARGS" in output


def test_recipe_for_nodes_with_twelve_intel_tiles(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    script = tmp_path / "job"  # PBS runs a copy
    script.write_bytes((ROOT / "cluster" / "aurora.sh").read_bytes())
    script.chmod(0o755)
    ray = tmp_path / "ray"
    visible = '\necho "$ZE_FLAT_DEVICE_HIERARCHY ${ZE_AFFINITY_MASK-unset}" >> "$LOG"\n'
    ray.write_text(ray.read_text().replace("\n", visible, 1))
    variables = {"ZE_AFFINITY_MASK": "0,1,2,3", "ENDS_WITH": "3", "RESUBMIT": "cluster/aurora.sh"}
    returned, output, log = run_job(script, env | variables)
    assert returned == 0, output
    mpiexec, environment, ray_command, *driver, resubmitted = log
    assert mpiexec == "mpiexec -n 2 --ppn 1" and environment == "FLAT unset"
    assert "--min-nodes 2 --num-cpus 64 --num-gpus 12 -- bash" in ray_command
    settings = ["cluster.device=xpu", "cluster.network_interface=hsn0", "cluster.address=10.0.0.1:6379"]
    assert driver == ["driver", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a", *settings]
    assert resubmitted == "qsub -V cluster/aurora.sh"
    load_config(None, settings)
