"""Nodes and their slots, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One machine: `slots` workers fit on it (its free GPUs, or its free CPUs where the run trains on CPU)."""

    id: str
    address: str
    slots: int


@dataclass(frozen=True)
class Topology:
    """The nodes of a cluster, in node-id order, and what a slot is."""

    nodes: tuple[Node, ...]
    device: str  # "cuda" or "cpu"

    @property
    def resource(self) -> str:
        """Ray's word for a slot."""
        return "GPU" if self.device == "cuda" else "CPU"

    @property
    def slots(self) -> int:
        """Workers that fit in all."""
        return sum(node.slots for node in self.nodes)
