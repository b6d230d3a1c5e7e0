"""Which task of a job this process is, as Slurm, PBS and MPI launchers say in its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LauncherTask:
    """One process of `size` that a launcher has started together. `local_rank`: its number on its node, where said."""

    launcher: str
    rank: int
    num_tasks: int
    local_rank: int | None


# Launcher, and its words for rank, size and number on the node; first what is sure: several speak MPICH's words, too.
_LAUNCHER_VARIABLES = (
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),  # sbatch's own script has no step
    ("mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec (PALS)", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID"),  # Polaris and Aurora
    ("mpiexec (Intel MPI)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("mpiexec (MPICH)", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
)


def detect_launcher_task(environment: Mapping[str, str]) -> LauncherTask | None:
    """This process's; None where no launcher started it, or none whose words are known.

    Words that are no numbers are nobody's. Of two launchers with the same words the one counts that says more.
    """
    found = []
    for launcher, *words in _LAUNCHER_VARIABLES:
        rank, size, local = (_parse_number(environment.get(word)) for word in words)
        if rank is not None and size is not None and rank < size:
            found.append(LauncherTask(launcher, rank, size, local))
    return next((task for task in found if task.local_rank is not None), next(iter(found), None))


def _parse_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
