"""CPUs that this process may use: those of its affinity mask, limited by the CPU quota of its cgroups (v1 and v2).

Memory limits of the cgroups are read in the same way.

A container or a Slurm allocation usually has fewer CPUs than the machine, which is what `os.cpu_count` reports.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_CGROUP_MOUNT = "sys/fs/cgroup"
_KEPT_COUNT = "RAYTRAIN_AFFINITY_CPUS"  # environment variable
_UNIFIED = ""  # the controller list of the version 2 hierarchy in /proc/self/cgroup


@dataclass(frozen=True)
class CpuLimits:
    """CPUs of the machine, of the affinity mask, and the CPU time per second that cgroups allow (None: no limit)."""

    installed: int
    affinity: int
    quota: float | None = None

    @property
    def usable(self) -> int:
        """Number of threads that can run at once without being throttled; at least 1."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


def count_usable_cpus() -> int:
    """Return the number of CPUs to use on this machine, for the number of processes or threads to start."""
    return read_cpu_limits().usable


def read_cpu_limits(root: Path = Path("/")) -> CpuLimits:
    """Return the CPU limits of this process, without its binding to a NUMA node; see `keep_cpu_count`.

    `root`: directory that contains proc/ and sys/.
    """
    affinity = int(os.environ.get(_KEPT_COUNT, "0")) or len(os.sched_getaffinity(0))
    return CpuLimits(os.cpu_count() or 1, affinity, read_cpu_quota(root))


def keep_cpu_count(environment: MutableMapping[str, str]) -> None:
    """Remember the number of CPUs in the affinity mask, for this process and those that it starts.

    Call before the process is bound to some of them: what is divided among all processes of the host is not less then.
    """
    environment[_KEPT_COUNT] = str(len(os.sched_getaffinity(0)))


def read_cpu_quota(root: Path) -> float | None:
    """Return the lowest CPU quota of this process's cgroups and their ancestors, in CPUs; None if there is none.

    Files that cannot be read set no limit. A container sees its own cgroup as the root of the mount, whatever
    /proc/self/cgroup calls it.
    """
    try:
        groups = parse_cgroup_membership((root / "proc/self/cgroup").read_text())
    except OSError:
        return None
    version_2 = _list_groups(root, groups.get(_UNIFIED), ("", "unified"))
    quotas = [parse_cpu_max(_read_text(group / "cpu.max")) for group in version_2]
    quotas += [
        parse_cfs_quota(_read_text(group / "cpu.cfs_quota_us"), _read_text(group / "cpu.cfs_period_us"))
        for group in _list_groups(root, groups.get("cpu"), ("cpu", "cpu,cpuacct"))
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def list_memory_limits(root: Path = Path("/")) -> list[int]:
    """Return the memory limits of this process's cgroups and their ancestors, in bytes. `root`: as above."""
    try:
        groups = parse_cgroup_membership((root / "proc/self/cgroup").read_text())
    except OSError:
        return []
    texts = [_read_text(group / "memory.max") for group in _list_groups(root, groups.get(_UNIFIED), ("", "unified"))]
    version_1 = _list_groups(root, groups.get("memory"), ("memory",))
    texts += [_read_text(group / "memory.limit_in_bytes") for group in version_1]
    return [int(text) for text in texts if text.strip().isdigit()]


def parse_cgroup_membership(text: str) -> Mapping[str, str]:
    """Return controller -> cgroup path from the text of /proc/self/cgroup. The key of version 2 is ""."""
    lines = (line.split(":", 2) for line in text.splitlines())
    return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}


def parse_cpu_max(text: str) -> float | None:
    """Return the quota in a version 2 cpu.max file ("200000 100000", or "max 100000"), in CPUs; None: no limit."""
    quota, _, period = text.strip().partition(" ")
    return parse_cfs_quota(quota, period)


def parse_cfs_quota(quota: str, period: str) -> float | None:
    """Return quota / period, both in microseconds, in CPUs. None without a limit (-1, "max", or not a number)."""
    try:
        cpus = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return cpus if cpus > 0 else None


def _list_groups(root: Path, path: str | None, mounts: Iterable[str]) -> Iterator[Path]:
    """Yield the directories of a cgroup and its ancestors below each mount point, by its usual name."""
    if path is None:
        return
    names = PurePosixPath(path).relative_to("/")
    for mount in mounts:
        for name in (names, *names.parents):
            yield root / _CGROUP_MOUNT / mount / name


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
