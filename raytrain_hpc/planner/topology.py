"""Cluster topology as plain data: nodes and their slots."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_hpc.device_backends import get_ray_resource, is_accelerator_type


@dataclass(frozen=True)
class Node:
    """A node that fits `slots` workers: its free GPUs, or its free CPUs if the run trains on CPU."""

    id: str
    address: str
    slots: int
    rack: str = ""  # or the switch, empty if unknown
    host: str = ""  # name of its host; several simulated nodes can share one


@dataclass(frozen=True)
class Topology:
    """The nodes of a cluster, in order of their ids, and the device type of a slot."""

    nodes: tuple[Node, ...]
    device: str  # torch's name of its type
    accelerator: str = ""  # device preset of the GPUs, empty if they differ or are unknown
    has_bf16: bool = False  # whether the slots are accelerators that compute in bf16
    without_float8: tuple[str, ...] = ()  # names of its accelerators that are known not to compute in float8

    @property
    def ray_resource(self) -> str:
        """Name of the Ray resource that a slot takes."""
        return get_ray_resource(self.device)

    @property
    def has_accelerators(self) -> bool:
        """Whether the slots are accelerators."""
        return is_accelerator_type(self.device)

    @property
    def device_name(self) -> str:
        """Name of the device preset in planner/hardware.py, empty if there is none."""
        return self.accelerator if self.has_accelerators else self.device

    @property
    def has_racks(self) -> bool:
        """Whether the rack of any node is known."""
        return any(node.rack for node in self.nodes)

    @property
    def total_slots(self) -> int:
        """Number of workers that fit on all nodes together."""
        return sum(node.slots for node in self.nodes)
