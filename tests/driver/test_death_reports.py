"""What the agent of a node tells about workers that have died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_hpc.driver import node_agent
from raytrain_hpc.driver.node_agent import NodeAgent, WatchedProcess
from tests.warm_pool import make_small_config

WORKER = """
import ctypes, sys, time
from raytrain_hpc.runtime.heartbeat import Heartbeat

def crash():
    sys.stdin.readline()
    ctypes.string_at(0)

print(Heartbeat().path, flush=True)
crash()
"""


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    agent = NodeAgent(make_small_config(None))
    yield agent
    agent.close()


@pytest.fixture
def workers(agent: NodeAgent) -> Iterator[list[subprocess.Popen[str]]]:
    """Three workers that the agent watches as ranks 4, 5 and 6."""
    command = [sys.executable, "-c", WORKER]
    processes = [subprocess.Popen(command, stdin=-1, stdout=-1, stderr=-3, text=True) for _ in range(3)]
    pulses = [process.stdout.readline().strip() for process in processes]  # type: ignore[union-attr]
    agent.watch({4 + i: WatchedProcess(p.pid, pulses[i]) for i, p in enumerate(processes)})
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_crash_is_told_from_a_kill(agent: NodeAgent, workers: list[subprocess.Popen[str]]) -> None:
    assert agent.explain_deaths() == {}
    workers[0].stdin.write("\n")  # type: ignore[union-attr]
    workers[0].stdin.flush()  # type: ignore[union-attr]
    os.kill(workers[1].pid, signal.SIGKILL)
    assert (workers[0].wait(timeout=30), workers[1].wait(timeout=30)) == (-signal.SIGSEGV, -signal.SIGKILL)
    (rank, report), *others = agent.explain_deaths().items()
    assert (rank, others) == (4, []), "nothing is known of the process that was killed, and one lives"
    assert (report.kind, report.reason) == ("crashed", "segmentation fault in its process")
    assert "in crash" in report.stacks[4] and "string_at" in report.stacks[4]


def test_a_process_that_the_kernel_has_killed_for_memory(
    agent: NodeAgent, workers: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts such kills; none may be old."""
    real = int(next(line for line in Path("/proc/vmstat").read_text().splitlines() if "oom_kill " in line).split()[1])
    (tmp_path / "vmstat").write_text(f"nr_free_pages 7\noom_kill {real + 1}\n")
    os.kill(workers[2].pid, signal.SIGKILL)
    workers[2].wait(timeout=30)
    assert agent.explain_deaths() == {}
    monkeypatch.setattr(node_agent, "_VMSTAT", tmp_path / "vmstat")
    assert {rank: report.kind for rank, report in agent.explain_deaths().items()} == {6: "out of memory"}
    monkeypatch.setattr(node_agent, "_VMSTAT", tmp_path / "of a kernel without it")
    assert agent.explain_deaths() == {}
