"""CPUs and memory of this host, divided among the CPU workers that share it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from raytrain_hpc.cpu_limits import count_usable_cpus, list_memory_limits
from raytrain_hpc.planner.hardware import Machine


def fit_to_host(machine: Machine) -> Machine:
    """Return a machine of CPU workers on this host with the speed and the memory that each of them has.

    The preset of a CPU is one core. More workers than CPUs share them.
    """
    workers, device = machine.num_devices, machine.device
    share = min(1.0, count_usable_cpus() / workers)
    return replace(
        machine,
        device=replace(
            device,
            tflops=device.tflops * share,
            exact_tflops=device.exact_tflops * share,
            memory_gbs=device.memory_gbs * share,
            memory_gib=round(read_memory_bytes() / 2**30 / workers, 1),
            is_memory_known=True,
        ),
    )


def read_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this host, or of the cgroups of this process if they allow less.

    `root`: directory that contains proc/ and sys/.
    """
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *list_memory_limits(root)])
