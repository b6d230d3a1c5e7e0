"""CPUs counted from fake cgroup files of both versions, and from the affinity mask of a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_hpc.cpu_limits import CpuLimits, count_usable_cpus, list_memory_limits, read_cpu_limits, read_cpu_quota

# Contents of /proc/self/cgroup and of the files below /sys/fs/cgroup, and the quota in CPUs.
CGROUPS = {
    "v2, no limit": ("0::/user.slice\n", {"user.slice/cpu.max": "max 100000\n"}, None),
    "v2, limit of an ancestor": (
        "0::/slurm/job_17/step_0\n",
        {
            "slurm/cpu.max": "6400000 100000\n",
            "slurm/job_17/cpu.max": "350000 100000\n",
            "slurm/job_17/step_0/cpu.max": "max 100000\n",
        },
        3.5,
    ),
    "v2, container that sees its own group as the root": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    "v2, container with the path of the host": ("0::/docker/9f\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "v1": (
        "5:memory:/job\n4:cpuacct,cpu:/job/step\n1:name=systemd:/x\n",
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/job/cpu.cfs_quota_us": "400000\n",
            "cpu,cpuacct/job/cpu.cfs_period_us": "50000\n",
            "memory/job/cpu.cfs_quota_us": "1\n",
            "memory/job/cpu.cfs_period_us": "1000\n",
        },
        8.0,
    ),
    "both versions mounted": (
        "2:cpu:/a\n0::/b\n",
        {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000", "unified/b/cpu.max": "100000 100000"},
        1.0,
    ),
    "damaged files": ("0::/a\n", {"a/cpu.max": "lots\n", "cpu.max": "100000 0\n"}, None),
}


@pytest.mark.parametrize("name", CGROUPS)
def test_quota_is_the_lowest_of_the_cgroups_and_their_ancestors(name: str, tmp_path: Path) -> None:
    membership, files, expected = CGROUPS[name]
    for path, text in {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{p}": t for p, t in files.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert read_cpu_quota(tmp_path) == expected
    assert read_cpu_limits(tmp_path).quota == expected


def test_memory_limits_of_both_versions(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/job\n0::/slurm/step\n",
        "sys/fs/cgroup/slurm/memory.max": "8589934592\n",
        "sys/fs/cgroup/slurm/step/memory.max": "max\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4294967296\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert list_memory_limits(tmp_path) == [8 << 30, 4 << 30]
    assert list_memory_limits(tmp_path / "nowhere") == []


def test_missing_files_set_no_limit(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path) is None


def test_usable_cpus_are_whole_and_at_least_one() -> None:
    assert CpuLimits(64, 8, None).usable == 8
    assert CpuLimits(64, 8, 3.5).usable == 3
    assert CpuLimits(64, 8, 0.5).usable == 1
    assert CpuLimits(64, 2, 16.0).usable == 2


def test_affinity_limits_the_count_although_the_machine_has_more() -> None:
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from raytrain_hpc.cpu_limits import count_usable_cpus; print(count_usable_cpus())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "1"
    assert 1 <= count_usable_cpus() <= len(os.sched_getaffinity(0))
