"""Memory of a command and its child processes, as PSS, which counts each shared page once."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from raytrain_hpc.errors import RunFailedError

_POLL_S = 0.25


def measure_peak_pss(command: Sequence[str], environment: Mapping[str, str], log: Path) -> tuple[float, float]:
    """Run a command and return the peak of the sum of PSS over its processes in MiB, and its seconds.

    Includes pages of Ray's object store that a process has mapped, but not the page cache.

    Raises:
        RunFailedError: The command failed.
    """
    start, peak = time.perf_counter(), 0
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | dict(environment))
        try:
            while process.poll() is None:
                peak = max(peak, sum(map(_read_pss_kib, _find_process_tree(process.pid))))
                time.sleep(_POLL_S)
        finally:
            process.terminate()
    if process.returncode:
        raise RunFailedError(f"{' '.join(command)}: exit code {process.returncode}: {log.read_text().strip()[-500:]}")
    return peak / 2**10, time.perf_counter() - start


def _find_process_tree(root: int) -> set[int]:
    """Return the pids of a process and all its descendants."""
    parents = {int(path.name): _read_parent_pid(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    pids, grew = {root}, True
    while grew:
        children = {pid for pid, parent in parents.items() if parent in pids} - pids
        pids |= children
        grew = bool(children)
    return pids


def _read_parent_pid(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):  # it has ended
        return 0


def _read_pss_kib(pid: int) -> int:
    """Read the PSS of a process in KiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
