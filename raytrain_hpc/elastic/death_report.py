"""Why a worker process has died, from what its node knows. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass, field

_FATAL = "Fatal Python error: "  # the first line that faulthandler writes on a fatal signal
# Texts of exceptions for too little memory: of Python, of torch on CPUs and on GPUs, and of cuBLAS.
_OUT_OF_MEMORY_PATTERNS = ("MemoryError", "out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
OUT_OF_MEMORY, CRASHED = "out of memory", "crashed"


@dataclass(frozen=True)
class DeathReport:
    """Kind of failure, reason, and the last Python stacks by rank, of a process that has died."""

    kind: str
    reason: str
    stacks: dict[int, str] = field(default_factory=dict)


def explain_death(rank: int, last_output: str, num_oom_kills: int) -> DeathReport | None:
    """Return why the process of a rank has died, or None if its node does not know, as after a SIGKILL.

    `last_output`: what the process wrote to its heartbeat file, where Python reports fatal signals. `num_oom_kills`:
    processes that the kernel of its node has killed for lack of memory since the generation began.
    """
    _, fatal, text = last_output.partition(_FATAL)
    if fatal:
        signal_name, _, stacks = text.partition("\n")
        return DeathReport(CRASHED, f"{signal_name.strip().lower()} in its process", {rank: stacks.strip()})
    if num_oom_kills:
        return DeathReport(OUT_OF_MEMORY, "the kernel has killed a process of its node for lack of memory")
    return None


def is_out_of_memory(reason: str) -> bool:
    """Return whether the text of an exception says that host or device had too little memory."""
    return any(pattern in reason for pattern in _OUT_OF_MEMORY_PATTERNS)
