"""Launcher tasks from the environment variables that the launchers' manuals document."""

from __future__ import annotations

import pytest

from raytrain_hpc.driver.launcher_env import LauncherTask, detect_launcher_task

SLURM_JOB = {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}
SLURM_STEP = {**SLURM_JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5", "SLURM_LOCALID": "1"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4"}


@pytest.mark.parametrize(
    "environment, task",
    [
        (SLURM_STEP, LauncherTask("srun", 5, 8, 1)),
        ({**SLURM_STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, LauncherTask("srun", 5, 8, 1)),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
            LauncherTask("mpirun (Open MPI)", 3, 16, 3),
        ),
        (
            {"PALS_RANKID": "7", "PALS_LOCAL_RANKID": "7", "PMI_RANK": "7", "PMI_SIZE": "24", "PMI_LOCAL_RANK": "7"},
            LauncherTask("mpiexec (PALS)", 7, 24, 7),
        ),
        ({**HYDRA, "MPI_LOCALRANKID": "0"}, LauncherTask("mpiexec (Intel MPI)", 2, 4, 0)),
        ({**HYDRA, "PMI_LOCAL_RANK": "1"}, LauncherTask("mpiexec (MPICH)", 2, 4, 1)),
        (
            {"PBS_JOBID": "9.x", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            LauncherTask("mpirun (Open MPI)", 0, 1, None),
        ),
    ],
)
def test_launcher_task_is_detected(environment: dict[str, str], task: LauncherTask) -> None:
    assert detect_launcher_task(environment) == task


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SLURM_JOB,  # a shell of salloc, or the script of sbatch
        {**SLURM_JOB, "SLURM_PROCID": "0"},
        {"PBS_JOBID": "9.polaris", "PBS_NODEFILE": "/var/spool/x", "NCPUS": "64"},
        {"PMI_RANK": "4", "PMI_SIZE": "4"},
        {"PMI_RANK": "-1", "PMI_SIZE": "four"},
    ],
)
def test_other_environments_are_no_launcher_task(environment: dict[str, str]) -> None:
    assert detect_launcher_task(environment) is None
