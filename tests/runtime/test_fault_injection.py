"""Injected faults that whole runs do not cover."""

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


def test_losing_a_node_kills_its_processes_and_no_others() -> None:
    """A process named like the raylet has two children, one of which injects the fault."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as bystander:
        node = subprocess.Popen([sys.executable, "-c", NODE], stdin=-1, stdout=-1, text=True)
        assert node.stdin is not None and node.stdout is not None
        children = [psutil.Process(int(pid)) for pid in node.stdout.readline().split()]
        node.stdin.write("\n")
        node.stdin.close()
        assert node.wait(timeout=60) == -signal.SIGKILL
        assert not psutil.wait_procs(children, timeout=10)[1]
        assert bystander.poll() is None
        bystander.kill()
    node.stdout.close()
