"""The deadline of a run: from run.deadline, or from the Slurm or PBS job that this process belongs to."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from raytrain_hpc.config.deadline_text import parse_deadline
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.elastic.deadline import Deadline
from raytrain_hpc.errors import ConfigError

_SLURM_JOB_END = "SLURM_JOB_END_TIME"  # Unix time, set by recent Slurm
_PBS_JOB, _PBS_WALLTIME = "PBS_JOBID", "PBS_WALLTIME"  # the limit in seconds; set by Torque, not by PBS Professional


def find_deadline(config: Config, environment: Mapping[str, str], start_unix: float) -> Deadline | None:
    """Return the deadline of a run whose command started at `start_unix`, or None if there is none.

    Raises ConfigError if run.deadline is a time that has passed. The end of a job that has passed is ignored: the
    variable then belongs to another job, or the job was extended.
    """
    setting = config.run.deadline
    if setting != AUTO:
        unix = parse_deadline(setting, start_unix)
        if unix is not None and unix <= time.time():
            raise ConfigError("run.deadline", setting, config.origin("run.deadline"), "has passed; give a later time")
        return None if unix is None else Deadline(unix, f"run.deadline={setting}")
    deadline = find_job_end(environment)
    return deadline if deadline is not None and deadline.unix > time.time() else None


def find_job_end(environment: Mapping[str, str]) -> Deadline | None:
    """Return the end of the Slurm or PBS job of this process, or None if no variable tells."""
    if (end := _parse_seconds(environment.get(_SLURM_JOB_END))) is not None:
        return Deadline(end, _SLURM_JOB_END)
    job, limit_s = environment.get(_PBS_JOB), _parse_seconds(environment.get(_PBS_WALLTIME))
    return None if job is None or limit_s is None else Deadline(find_job_start(job) + limit_s, _PBS_WALLTIME)


def find_job_start(job: str) -> float:
    """Return the Unix time at which the first process of a PBS job started that still runs on this host.

    On the first node that is the script or shell of the job, whichever way it started this process.
    """
    start: float = psutil.Process().create_time()
    for process in psutil.process_iter():
        try:
            if process.environ().get(_PBS_JOB) == job:
                start = min(start, process.create_time())
        except psutil.Error:  # it has ended, or belongs to another user
            continue
    return start


def _parse_seconds(text: str | None) -> float | None:
    return float(text) if text is not None and text.isascii() and text.isdigit() and int(text) > 0 else None
