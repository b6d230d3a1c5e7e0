"""How a host is wired, from the kernel's files: the NUMA node of a device, network adapters, and switches by Slurm."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)
_SYSFS = Path("/sys")
_TASKS = Path("/proc/self/task")
_UNKNOWN_NODE = -1  # of the kernel, for a device that belongs to no NUMA node


@dataclass(frozen=True)
class Adapter:
    """A network adapter. `gbits`: its rate in Gbit/s, 0 if unknown. `numa_node`: None if unknown."""

    name: str
    is_up: bool
    gbits: float
    numa_node: int | None


def find_numa_node(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node of a PCI device such as "0000:18:00.0", None if the kernel knows none."""
    return _read_numa_node(sysfs / "bus" / "pci" / "devices" / pci_address)


def read_cpus_of_node(numa_node: int, sysfs: Path = _SYSFS) -> set[int]:
    """Return the CPUs of a NUMA node, empty if there is no such node."""
    return parse_cpu_list(_read(sysfs / "devices" / "system" / "node" / f"node{numa_node}" / "cpulist"))


def parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a kernel's list such as "0-2,8"."""
    cpus: set[int] = set()
    for part in text.strip().split(",") if text.strip() else ():
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def bind_to_numa_node(numa_node: int, sysfs: Path = _SYSFS, tasks: Path = _TASKS) -> bool:
    """Keep all threads of this process, and those that they start, on the CPUs of a NUMA node.

    A transfer to a device of another node crosses the link between sockets. CPUs that this process may not use are left
    out. Returns False, and changes nothing, if they are more than half of the node, or if the system refuses.
    """
    cpus = read_cpus_of_node(numa_node, sysfs)
    usable = cpus & os.sched_getaffinity(0)
    if not usable or 2 * len(usable) < len(cpus):
        return False
    for task in tasks.iterdir():
        try:
            os.sched_setaffinity(int(task.name), usable)
        except ProcessLookupError:  # the thread has ended
            continue
        except OSError as error:  # a sandbox, or a cpuset that has changed
            _log.warning("NUMA node %d: threads cannot be kept on its CPUs: %s", numa_node, error)
            return False
    return True


def list_adapters(sysfs: Path = _SYSFS) -> list[Adapter]:
    """Return the InfiniBand and RoCE ports of this host, and its Ethernet interfaces that are devices, by name.

    An interface without a cable is left out, unlike a port, which is there for the collectives.
    """
    ports = [_read_port(port) for port in sorted((sysfs / "class" / "infiniband").glob("*/ports/*"))]
    interfaces = [_read_interface(path) for path in sorted((sysfs / "class" / "net").glob("*"))]
    return ports + [adapter for adapter in interfaces if adapter is not None and adapter.is_up]


def find_switch(environ: Mapping[str, str]) -> str:
    """Return the switch of this node by Slurm's topology plugin, "" if it is not set.

    SLURM_TOPOLOGY_ADDR names the switches from the top down to the node, and the pattern what each part is.
    """
    if "switch" not in environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""):
        return ""
    *switches, _ = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    return re.sub(r"[^A-Za-z0-9_-]", "_", switches[-1]) if switches else ""


def _read_port(port: Path) -> Adapter:
    adapter = port.parents[1]
    number = f":{port.name}" if len(list(port.parent.iterdir())) > 1 else ""
    rate = re.match(r"[\d.]+", _read(port / "rate"))
    is_up = "ACTIVE" in _read(port / "state")
    return Adapter(adapter.name + number, is_up, float(rate[0]) if rate else 0.0, _read_numa_node(adapter / "device"))


def _read_interface(path: Path) -> Adapter | None:
    """Return an Ethernet interface, None for a virtual one."""
    if not (path / "device").exists():
        return None
    mbits = _read(path / "speed").strip()  # -1 or an error if the driver does not tell
    gbits = int(mbits) / 1000 if mbits.isdigit() else 0.0
    return Adapter(path.name, _read(path / "operstate").strip() == "up", gbits, _read_numa_node(path / "device"))


def _read_numa_node(device: Path) -> int | None:
    text = _read(device / "numa_node").strip()
    return int(text) if text and int(text) != _UNKNOWN_NODE else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
