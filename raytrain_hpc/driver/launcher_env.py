"""Detection of the launcher (Slurm, PBS, MPI) that started this process, from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherTask:
    """One of `num_tasks` processes that a launcher started together. `local_rank`: its index on its node, if known."""

    launcher: str
    rank: int
    num_tasks: int
    local_rank: int | None


# Launcher; its variables for rank, size and local rank. Unambiguous ones come first: several also set MPICH's.
_LAUNCHER_VARIABLES = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # not set in the sbatch script itself
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # Polaris and Aurora
    ("mpiexec (Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
)


def detect_launcher_task(environment: Mapping[str, str]) -> LauncherTask | None:
    """Return the launcher task that this process is, or None if no known launcher started it.

    Values that are not numbers are ignored. If several launchers match, the first one with a local rank is returned.
    """
    tasks = []
    for launcher, *variables in _LAUNCHER_VARIABLES:
        rank, size, local_rank = (_parse_number(environment.get(variable)) for variable in variables)
        if rank is not None and size is not None and rank < size:
            tasks.append(LauncherTask(launcher, rank, size, local_rank))
    return next((task for task in tasks if task.local_rank is not None), next(iter(tasks), None))


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
