"""Nodes and their slots, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One machine: `slots` workers fit on it (its free GPUs, or its free CPUs where the run trains on CPU)."""

    id: str
    address: str
    slots: int
    rack: str = ""  # or the switch it hangs on, where that is known


@dataclass(frozen=True)
class Topology:
    """The nodes of a cluster, in node-id order, and what a slot is."""

    nodes: tuple[Node, ...]
    device: str  # "cuda" or "cpu"
    accelerator: str = ""  # the GPUs' name in plan.hardware, where all have one that is known there

    @property
    def ray_resource(self) -> str:
        """Ray's word for a slot."""
        return "GPU" if self.device == "cuda" else "CPU"

    @property
    def device_name(self) -> str:
        """What plan.hardware calls the devices; nothing where it knows none of their name."""
        return "cpu" if self.device == "cpu" else self.accelerator

    @property
    def has_racks(self) -> bool:
        """Whether anything is known of racks."""
        return any(node.rack for node in self.nodes)

    @property
    def total_slots(self) -> int:
        """Workers that fit in all."""
        return sum(node.slots for node in self.nodes)
