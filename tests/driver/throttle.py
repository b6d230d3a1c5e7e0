"""Settings under which the ranks of a run leave CPU time to the processes that a test waits for."""

from __future__ import annotations


def throttle(workers: int, *faults: str) -> list[str]:
    """Return settings under which the first `workers` ranks sleep two thirds of the time.

    Use it for a run that trains until something happens, such as the start of a worker: with busy ranks on every CPU,
    that takes longer. `faults`: further entries of fault.inject. No rank counts as a straggler.
    """
    slow = [f"{{kind: slow, rank: {rank}, step: 1}}" for rank in range(workers)]
    return [f"fault.inject=[{', '.join([*slow, *faults])}]", "fault.straggler_factor=1000"]
