"""Devices and the links between them, as plain data: what a plan assumes of a cluster."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log2, nan
from typing import Any, TypeVar

from raytrain_hpc.errors import ConfigError

_LAUNCH_S = 60e-6  # from asking for a collective until anything moves


@dataclass(frozen=True)
class Device:
    """One accelerator. `tflops`: dense bf16 peak; `exact_tflops`: of fp32 without shortcuts. `memory_gib`: what a
    process can use, `reserved_gib` of it for its own context, kernels and communication buffers. `memory_gbs`: its
    memory's bandwidth in GB/s. `inside`, `across`: the names of the links that its nodes most often have."""

    name: str
    tflops: float
    exact_tflops: float
    memory_gib: float
    memory_gbs: float
    inside: str
    across: str
    reserved_gib: float = 3.0


@dataclass(frozen=True)
class Link:
    """What joins devices. `gbs`: GB/s a device in one direction. `latency_s`: of one message.

    `all_reduce`, `gather`: bus bandwidth that collectives reach, as shares of that (`gather` is for all-gather,
    reduce-scatter and all-to-all): within a node one number; between 2, 4, 8, ... nodes one each, the last also for
    more.
    """

    name: str
    gbs: float
    latency_s: float
    all_reduce: tuple[float, ...]
    gather: tuple[float, ...]

    def get_efficiency(self, kind: str, doublings: float) -> float:
        """The share at a number of nodes, `doublings` of the first number listed; between two listed, geometric."""
        shares = self.all_reduce if kind == "all_reduce" else self.gather
        at = min(max(doublings, 0.0), len(shares) - 1.0)
        low = min(int(at), len(shares) - 2) if len(shares) > 1 else 0
        if len(shares) == 1:
            return shares[0]
        part = at - low
        return exp(log(shares[low]) * (1 - part) + log(shares[low + 1]) * part)


_Preset = TypeVar("_Preset", Device, Link)

# Dense bf16 peaks and memory as in the makers' data sheets (a PVC device is both tiles of a Max 1550).
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312.0, 19.5, 80.0, 2039.0, "nvlink3", "infiniband-hdr"),
        Device("h100", 989.0, 67.0, 79.1, 3350.0, "nvlink4", "infiniband-ndr"),
        Device("h200", 989.0, 67.0, 141.0, 4800.0, "nvlink4", "infiniband-ndr"),
        Device("b200", 2250.0, 75.0, 180.0, 8000.0, "nvlink5", "infiniband-ndr"),
        Device("mi300x", 1307.0, 163.4, 192.0, 5300.0, "infinity-fabric", "infiniband-ndr"),
        Device("pvc", 420.0, 52.0, 128.0, 3276.0, "xe-link", "slingshot"),
        Device("cpu", 0.2, 0.1, 8.0, 15.0, "memory", "ethernet", 0.0),  # one core
    )
}

# Bus bandwidth of 256 MB messages measured on nodes of eight H100 (Ultrascale playbook, Hugging Face 2025): inside one
# 436 GB/s for all-reduce and 250 for all-gather and reduce-scatter, of 450 that NVLink 4 has in one direction; over 2,
# 4, ..., 64 nodes 362, 160, 100, 85, 65, 33 and 185, 119, 69, 55, 28, 11 of the 400 of a node's eight adapters. No
# other fabric's figures are known here: all are taken to reach the same shares.
_INTRA_NODE_EFFICIENCY = ((436 / 450,), (250 / 450,))
_INTER_NODE_EFFICIENCY = (
    tuple(gbs / 400 for gbs in (362, 160, 100, 85, 65, 33)),
    tuple(gbs / 400 for gbs in (185, 119, 69, 55, 28, 11)),
)
LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 300.0, 5e-6, *_INTRA_NODE_EFFICIENCY),
        Link("nvlink4", 450.0, 3e-6, *_INTRA_NODE_EFFICIENCY),
        Link("nvlink5", 900.0, 3e-6, *_INTRA_NODE_EFFICIENCY),
        Link("infinity-fabric", 448.0, 5e-6, *_INTRA_NODE_EFFICIENCY),
        Link("xe-link", 186.0, 5e-6, *_INTRA_NODE_EFFICIENCY),
        Link("pcie", 32.0, 10e-6, *_INTRA_NODE_EFFICIENCY),
        Link("memory", 2.0, 100e-6, (0.5,), (0.5,)),  # between processes of one machine, through gloo
        Link("infiniband-hdr", 25.0, 10e-6, *_INTER_NODE_EFFICIENCY),
        Link("infiniband-ndr", 50.0, 10e-6, *_INTER_NODE_EFFICIENCY),
        Link("slingshot", 25.0, 10e-6, *_INTER_NODE_EFFICIENCY),
        Link("ethernet", 3.0, 50e-6, *_INTER_NODE_EFFICIENCY),
    )
}


@dataclass(frozen=True)
class Machine:
    """A cluster: `nodes` of `per_node` devices each."""

    device: Device
    inside: Link
    across: Link
    nodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.nodes * self.per_node

    def estimate_collective_s(self, kind: str, bytes_sent: float, ranks: int, ranks_per_node: int) -> float:
        """Seconds of one collective in which each of `ranks` ranks, `a_node` of them a node, sends `sent` bytes.

        Alpha-beta: a message to the neighbour for each other rank, and what is sent by the bandwidth of a rank. Within
        a node that is the link's; across nodes the least of that, of the adapters of the group's ranks on a node, and
        of what as many nodes have been seen to reach. `sent` is (p-1)/p n for all-gather, reduce-scatter and
        all-to-all of n bytes and twice that for all-reduce, for which the latency counts twice, too.
        """
        if ranks == 1 or not bytes_sent:
            return 0.0
        rounds = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        gbs = self.inside.gbs * self.inside.get_efficiency(kind, 0)
        nodes = -(-ranks // ranks_per_node)
        if nodes > 1:
            reached = self.across.gbs * self.per_node * self.across.get_efficiency(kind, log2(nodes) - 1)
            gbs = min(gbs, self.across.gbs * ranks_per_node, reached)
        crossed = rounds // ranks_per_node if nodes > 1 else 0
        latency = crossed * self.across.latency_s + (rounds - crossed) * self.inside.latency_s
        return _LAUNCH_S + latency + bytes_sent / (gbs * 1e9)

    def estimate_transfer_s(self, size: float, *, across: bool) -> float:
        """Seconds of one message of `size` bytes from one device to another."""
        link = self.across if across else self.inside
        return _LAUNCH_S + link.latency_s + size / (link.gbs * 1e9)


def find_device_preset(name: str) -> str:
    """The device that is meant by a maker's name, such as "NVIDIA H100 80GB HBM3"; nothing where none is known."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((device for device in DEVICES if device in words), "")


def make_machine(
    device: str,
    nodes: int,
    per_node: int,
    inside: str = "",
    across: str = "",
    measured: tuple[Link | None, Link | None] = (None, None),
) -> Machine:
    """A cluster by the names of its parts.

    Links that are not named are those that were measured, inside a node and across, else those its device most often
    has. A name may be followed by numbers that differ, as in "h100,memory_gib=64" or "nvlink4,gbs=200". Raises
    ConfigError for a name that is not known, and a number that it has not.
    """
    found = _apply_overrides(
        device, DEVICES, "device", ("tflops", "exact_tflops", "memory_gib", "memory_gbs", "reserved_gib")
    )
    links = []
    for key, named, usual, own in (
        ("inside", inside, found.inside, measured[0]),
        ("across", across, found.across, measured[1]),
    ):
        preset = _apply_overrides(named or usual, LINKS, key, ("gbs", "latency_s"))
        links.append(own if own is not None and not named else preset)
    return Machine(found, links[0], links[1], nodes, per_node)


def get_preset_name(text: str) -> str:
    """The name alone, of one that numbers may follow."""
    return text.lower().partition(",")[0]


def _apply_overrides(text: str, presets: Mapping[str, _Preset], key: str, numbers: Sequence[str]) -> _Preset:
    found = presets.get(get_preset_name(text))
    if found is None:
        raise ConfigError(key, text, "command line", f"known: {', '.join(presets)}")
    changes: dict[str, Any] = {}
    for change in text.lower().split(",")[1:]:
        name, _, value = change.partition("=")
        if name not in numbers:
            raise ConfigError(
                key, text, "command line", f"{name!r} is no number of it; these are: {', '.join(numbers)}"
            )
        changes[name] = _parse_positive(value, key, text)
    return replace(found, **changes)


def _parse_positive(value: str, key: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = nan
    if not 0 < number < inf:
        raise ConfigError(key, text, "command line", f"{value!r} must be a number above 0")
    return number
