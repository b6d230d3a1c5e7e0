"""Causes of a death: a fatal signal of the process's own, the kernel's out-of-memory killer, or unknown."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.elastic.death_report import DeathReport, explain_death, is_out_of_memory

CRASH = """Thread 0x1 (most recent call first):
  an earlier request for stacks
Fatal Python error: Segmentation fault

Current thread 0x2 (most recent call first):
  File "train.py", line 7 in step
"""


def test_a_fatal_signal_is_named_with_the_last_stacks() -> None:
    report = explain_death(3, CRASH, 1)
    assert report is not None and (report.kind, report.reason) == ("crashed", "segmentation fault in its process")
    assert report.stacks[3].startswith("Current thread") and report.stacks[3].endswith("line 7 in step")


def test_the_kernel_has_killed_for_memory_or_somebody_has_killed() -> None:
    assert explain_death(0, "", 0) is None
    assert explain_death(0, "stacks", 2) == DeathReport(
        "out of memory", "the kernel has killed a process of its node for lack of memory"
    )


def test_exceptions_for_too_little_memory() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_python:
        bytearray(1 << 60)
    for error in (of_torch.value, of_python.value):
        assert is_out_of_memory(f"{type(error).__name__}: {error}".splitlines()[0])
    assert is_out_of_memory("OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB")
    assert not is_out_of_memory("ValueError: a remembered value")
