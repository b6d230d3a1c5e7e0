"""The Slurm script with stand-ins for Slurm and Ray: its commands, the end of the job, and what follows the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from raytrain_hpc.config.loader import load_config
from tests.jobs.fake_commands import ROOT, install_fake_commands, run_job

SCRIPT = ROOT / "cluster" / "slurm.sh"
STAND_INS = {
    # The exit code of the real one is the highest of all tasks: that of a task killed when the driver has ended.
    "srun": 'while [ "$1" != bash ]; do shift; done; "$@"; exit 137',
    "squeue": 'echo "squeue $*" >> "$LOG"; echo 2033-05-18T03:33:20',
    "scontrol": 'echo "scontrol $*" >> "$LOG"',
}
WORDS = ["conf/llama3_8b.yaml", "run.dir=/shared/a b"]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "4", "HEAD_IP": "10.0.0.1"}
    yield install_fake_commands(tmp_path, STAND_INS) | slurm | {"SLURM_JOB_END_TIME": "4000000000"}
    assert list((tmp_path / "tmp").iterdir()) == []  # the script cleans up after itself


@pytest.mark.parametrize("code", [0, 2, 4])
def test_exit_code_is_that_of_the_driver(env: dict[str, str], code: int) -> None:
    returned, output, (ray, *driver) = run_job(SCRIPT, env | {"ENDS_WITH": str(code)}, *WORDS)
    assert returned == code, output
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 3 --num-cpus 4 -- bash -c")
    assert driver == ["driver", "train", *WORDS, "cluster.address=10.0.0.1:6379"]
    assert float(Path(env["JOB_END"]).read_text()) == 4e9


@pytest.mark.parametrize(
    ("pattern", "address", "label"),
    [
        ("switch.switch.node", "core.leaf7.node12", "--labels rack=leaf7 "),
        ("switch.node", "rack[3].node12", "--labels rack=rack_3_ "),
        ("node", "node12", ""),
    ],
)
def test_nodes_are_labelled_with_their_switch(env: dict[str, str], pattern: str, address: str, label: str) -> None:
    topology = {"SLURM_TOPOLOGY_ADDR_PATTERN": pattern, "SLURM_TOPOLOGY_ADDR": address}
    returned, output, (ray, *driver) = run_job(SCRIPT, env | topology | {"ENDS_WITH": "0"}, *WORDS)
    assert returned == 0, output
    assert ray.startswith(f"ray symmetric-run {label}--address 10.0.0.1:6379 --min-nodes 3 ")
    assert driver == ["driver", "train", *WORDS, "cluster.address=10.0.0.1:6379"]


def test_run_that_stopped_in_time_is_requeued(env: dict[str, str]) -> None:
    returned, output, log = run_job(SCRIPT, env | {"ENDS_WITH": "3"}, *WORDS)
    assert (returned, log[-1]) == (0, "scontrol requeue 17") and "requeueing" in output


def test_end_of_the_job_is_asked_for_if_slurm_does_not_set_it(env: dict[str, str]) -> None:
    del env["SLURM_JOB_END_TIME"]
    returned, output, log = run_job(SCRIPT, env, *WORDS)
    assert returned == 0, output
    assert log[0] == "squeue --noheader --job 17 --format=%e"
    assert float(Path(env["JOB_END"]).read_text()) == datetime(2033, 5, 18, 3, 33, 20).timestamp() > time.time()


def test_ray_that_does_not_start_is_a_failure(env: dict[str, str]) -> None:
    returned, _, log = run_job(SCRIPT, env | {"RAY_FAILS": "yes"}, *WORDS)
    assert returned == 137 and len(log) == 1


@pytest.mark.parametrize("devices", ["", "0,1,2,3,4,5,6,7"])
def test_ray_is_told_which_amd_gpus_slurm_has_assigned(env: dict[str, str], tmp_path: Path, devices: str) -> None:
    ray = tmp_path / "ray"
    ray.write_text(
        ray.read_text().replace("\n", '\necho "${HIP_VISIBLE_DEVICES-} ${ROCR_VISIBLE_DEVICES-}" >> "$LOG"\n', 1)
    )
    returned, output, (visible, *_) = run_job(SCRIPT, env | {"ROCR_VISIBLE_DEVICES": devices}, *WORDS)
    assert returned == 0, output
    assert visible == f"{devices} "


def test_recipe_for_nodes_with_eight_amd_dies(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cluster").symlink_to(ROOT / "cluster")
    script = tmp_path / "job"  # Slurm runs a copy
    script.write_bytes((ROOT / "cluster" / "frontier.sh").read_bytes())
    script.chmod(0o755)
    returned, output, log = run_job(script, env | {"SLURM_SUBMIT_DIR": str(tmp_path), "ENDS_WITH": "3"}, *WORDS)
    assert returned == 0, output
    (ray, *driver), requeue = log[:-1], log[-1]
    assert ray.startswith("ray symmetric-run --address 10.0.0.1:6379 --min-nodes 3 --num-cpus 4 -- ")
    settings = ["cluster.device=cuda", "cluster.network_interface=hsn0", "cluster.address=10.0.0.1:6379"]
    assert driver == ["driver", "train", *WORDS, *settings] and requeue == "scontrol requeue 17"
    load_config(None, settings)
