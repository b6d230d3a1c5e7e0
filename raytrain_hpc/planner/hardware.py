"""Devices and links as plain data: the hardware that a plan assumes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, log2, nan
from typing import Any, TypeVar

from raytrain_hpc.errors import ConfigError

_LAUNCH_S = 60e-6  # from the launch of a collective to its first byte


@dataclass(frozen=True)
class Device:
    """One accelerator.

    `tflops`: dense bf16 peak; `exact_tflops`: fp32 peak without TF32. `memory_gib`: memory usable by a process, of
    which `reserved_gib` go to its context, kernels and communication buffers. `memory_gbs`: memory bandwidth in GB/s.
    `inside`, `across`: names of the links that its nodes usually have, within a node and across nodes.
    `float8_speedup`: peak of float8 products relative to bf16; 0: train.dtype=float8 does not run on it.
    `is_memory_known`: `memory_gib` is that of the device, not an assumption.
    """

    name: str
    tflops: float
    exact_tflops: float
    memory_gib: float
    memory_gbs: float
    inside: str
    across: str
    reserved_gib: float = 3.0
    float8_speedup: float = 0.0
    is_memory_known: bool = True


@dataclass(frozen=True)
class Link:
    """A link between devices.

    `gbs`: GB/s per device in one direction. `latency_s`: latency of one message. `all_reduce`, `gather`: bus bandwidth
    that collectives reach, as shares of `gbs`; `gather` is for all-gather, reduce-scatter and all-to-all. Within a node
    this is one number; across nodes, one for each of 2, 4, 8, ... nodes, the last also for more.
    """

    name: str
    gbs: float
    latency_s: float
    all_reduce: tuple[float, ...]
    gather: tuple[float, ...]

    def get_efficiency(self, kind: str, doublings: float) -> float:
        """Return the share of the bandwidth that collectives reach.

        `doublings`: log2 of the number of nodes relative to the first listed one. Geometric interpolation between the
        listed numbers.
        """
        efficiencies = self.all_reduce if kind == "all_reduce" else self.gather
        position = min(max(doublings, 0.0), len(efficiencies) - 1.0)
        lower = min(int(position), len(efficiencies) - 2) if len(efficiencies) > 1 else 0
        if len(efficiencies) == 1:
            return efficiencies[0]
        fraction = position - lower
        return exp(log(efficiencies[lower]) * (1 - fraction) + log(efficiencies[lower + 1]) * fraction)


_Preset = TypeVar("_Preset", Device, Link)

# Dense bf16 peaks and memory from the vendors' data sheets. pvc: a Max 1550, pvc-tile: one of its two tiles, which is a
# device of its own unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE. mi250x: one of the two dies of a card.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", 312.0, 19.5, 80.0, 2039.0, "nvlink3", "infiniband-hdr"),
        Device("h100", 989.0, 67.0, 79.1, 3350.0, "nvlink4", "infiniband-ndr", float8_speedup=2.0),
        Device("h200", 989.0, 67.0, 141.0, 4800.0, "nvlink4", "infiniband-ndr", float8_speedup=2.0),
        Device("b200", 2250.0, 75.0, 180.0, 8000.0, "nvlink5", "infiniband-ndr", float8_speedup=2.0),
        Device("mi300x", 1307.0, 163.4, 192.0, 5300.0, "infinity-fabric", "infiniband-ndr"),
        Device("mi250x", 191.5, 47.9, 64.0, 1638.0, "infinity-fabric-2", "slingshot-1-of-2"),
        Device("pvc", 839.0, 52.0, 128.0, 3276.0, "xe-link", "slingshot"),
        Device("pvc-tile", 419.5, 26.0, 64.0, 1638.0, "xe-link", "slingshot-2-of-3"),
        Device("cpu", 0.2, 0.1, 8.0, 15.0, "memory", "ethernet", 0.0, is_memory_known=False),  # one core
    )
}

# Bus bandwidth of 256 MB messages on nodes of eight H100 (Ultrascale playbook, Hugging Face 2025). Within a node: 436
# GB/s for all-reduce and 250 for all-gather and reduce-scatter, of 450 that NVLink 4 has in one direction. On 2, 4,
# ..., 64 nodes: 362, 160, 100, 85, 65, 33 and 185, 119, 69, 55, 28, 11 of the 400 GB/s of a node's eight adapters.
# Other fabrics are assumed to reach the same shares.
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
        # Between dies of different cards of a Frontier node, 50 to 100 in its user guide, and 200 within a card.
        Link("infinity-fabric-2", 100.0, 5e-6, *_INTRA_NODE_EFFICIENCY),
        Link("xe-link", 186.0, 5e-6, *_INTRA_NODE_EFFICIENCY),
        Link("pcie", 32.0, 10e-6, *_INTRA_NODE_EFFICIENCY),
        Link("memory", 2.0, 100e-6, (0.5,), (0.5,)),  # between processes of one machine, through gloo
        Link("infiniband-hdr", 25.0, 10e-6, *_INTER_NODE_EFFICIENCY),
        Link("infiniband-ndr", 50.0, 10e-6, *_INTER_NODE_EFFICIENCY),
        Link("slingshot", 25.0, 10e-6, *_INTER_NODE_EFFICIENCY),  # one adapter per device
        Link("slingshot-2-of-3", 16.7, 10e-6, *_INTER_NODE_EFFICIENCY),  # 8 adapters for 12 tiles, as in Aurora
        Link("slingshot-1-of-2", 12.5, 10e-6, *_INTER_NODE_EFFICIENCY),  # 4 adapters for 8 dies, as in Frontier
        Link("ethernet", 3.0, 50e-6, *_INTER_NODE_EFFICIENCY),
    )
}
# Words of the names that drivers and Ray have for devices.
_PRESETS_BY_WORD = {name: name for name in DEVICES} | {"1550": "pvc-tile"}


@dataclass(frozen=True)
class Machine:
    """A cluster of `nodes` nodes with `per_node` devices each."""

    device: Device
    inside: Link
    across: Link
    nodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        """Number of devices in the cluster."""
        return self.nodes * self.per_node

    def estimate_collective_s(self, kind: str, bytes_sent: float, ranks: int, ranks_per_node: int) -> float:
        """Estimate the seconds of a collective of `ranks` ranks, `ranks_per_node` on a node, each sending `bytes_sent`.

        Alpha-beta model: one message per other rank, plus the bytes divided by the bandwidth. Within a node that is the
        bandwidth of the link. Across nodes it is the smallest of the link in a node, the network adapters of the
        group's ranks on a node, and the bandwidth reached on that number of nodes. `bytes_sent` is (p-1)/p n for
        all-gather, reduce-scatter and all-to-all of n bytes; for all-reduce it is twice that, and the latency counts
        twice too.
        """
        if ranks == 1 or not bytes_sent:
            return 0.0
        rounds = (2 if kind == "all_reduce" else 1) * (ranks - 1)
        gbs = self.inside.gbs * self.inside.get_efficiency(kind, 0)
        nodes = -(-ranks // ranks_per_node)
        if nodes > 1:
            network_gbs = self.across.gbs * self.per_node * self.across.get_efficiency(kind, log2(nodes) - 1)
            gbs = min(gbs, self.across.gbs * ranks_per_node, network_gbs)
        rounds_across = rounds // ranks_per_node if nodes > 1 else 0
        latency = rounds_across * self.across.latency_s + (rounds - rounds_across) * self.inside.latency_s
        return _LAUNCH_S + latency + bytes_sent / (gbs * 1e9)

    def estimate_transfer_s(self, size: float, *, across: bool) -> float:
        """Estimate the seconds of one message of `size` bytes between two devices."""
        link = self.across if across else self.inside
        return _LAUNCH_S + link.latency_s + size / (link.gbs * 1e9)


def find_device_preset(name: str) -> str:
    """Return the preset for a vendor's device name such as "NVIDIA H100 80GB HBM3", empty if there is none."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return next((device for word, device in _PRESETS_BY_WORD.items() if word in words), "")


def make_machine(
    device: str,
    nodes: int,
    per_node: int,
    inside: str = "",
    across: str = "",
    measured: tuple[Link | None, Link | None] = (None, None),
) -> Machine:
    """Return a cluster from the names of its device and links.

    Links that are not named are the `measured` ones, within a node and across nodes, else those that the device usually
    has. A name may be followed by overrides, as in "h100,memory_gib=64" or "nvlink4,gbs=200". Raises ConfigError for an
    unknown name or field.
    """
    preset = _apply_overrides(
        device, DEVICES, "device", ("tflops", "exact_tflops", "memory_gib", "memory_gbs", "reserved_gib")
    )
    links = []
    for key, name, default, measured_link in (
        ("inside", inside, preset.inside, measured[0]),
        ("across", across, preset.across, measured[1]),
    ):
        link = _apply_overrides(name or default, LINKS, key, ("gbs", "latency_s"))
        links.append(measured_link if measured_link is not None and not name else link)
    return Machine(preset, links[0], links[1], nodes, per_node)


def get_preset_name(text: str) -> str:
    """Return the name alone, without the overrides that may follow it."""
    return text.lower().partition(",")[0]


def _apply_overrides(text: str, presets: Mapping[str, _Preset], key: str, fields: Sequence[str]) -> _Preset:
    preset = presets.get(get_preset_name(text))
    if preset is None:
        raise ConfigError(key, text, "plan", f"known: {', '.join(presets)}")
    overrides: dict[str, Any] = {}
    for override in text.lower().split(",")[1:]:
        name, _, value = override.partition("=")
        if name not in fields:
            raise ConfigError(key, text, "plan", f"{name!r} is not a field of {key}; use one of: {', '.join(fields)}")
        overrides[name] = _parse_positive(value, key, text)
    return replace(preset, **overrides)


def _parse_positive(value: str, key: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = nan
    if not 0 < number < inf:
        raise ConfigError(key, text, "plan", f"{value!r} must be a number above 0")
    return number
