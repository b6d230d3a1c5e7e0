"""Faults on purpose that whole runs do not show."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

NODE = """
import subprocess, sys
open("/proc/self/comm", "w").write("raylet")
wait = [sys.executable, "-c", "import time; time.sleep(60)"]
lose = [sys.executable, "-c", "from raytrain_hpc.runtime.fault_injection import _lose_node; input(); _lose_node()"]
print(subprocess.Popen(wait, stdin=subprocess.DEVNULL).pid, subprocess.Popen(lose).pid, flush=True)
subprocess.run(wait)
"""


def test_a_node_is_lost_with_all_that_runs_there_and_nothing_else() -> None:
    """A process that calls itself what Ray's does, and its children, one of which has the fault."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as bystander:
        node = subprocess.Popen([sys.executable, "-c", NODE], stdin=-1, stdout=-1, text=True)
        assert node.stdin is not None and node.stdout is not None
        there = [psutil.Process(int(pid)) for pid in node.stdout.readline().split()]
        node.stdin.write("\n")
        node.stdin.close()
        assert node.wait(timeout=60) == -signal.SIGKILL
        assert not psutil.wait_procs(there, timeout=10)[1]
        assert bystander.poll() is None
        bystander.kill()
    node.stdout.close()
