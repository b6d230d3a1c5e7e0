"""Process groups and mesh of one generation. Nothing bound to them outlives it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from raytrain_hpc.plan.layout import AXES, Layout


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a generation meet: a store that lives with the driver, and a prefix of its own in it."""

    host: str
    port: int
    generation: int
    timeout_s: float


@dataclass(frozen=True)
class Place:
    """Where one rank stands: its number, its device, and the mesh of the axes that have more than one rank."""

    rank: int
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None  # None: one rank alone

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """All ranks that read different data (with no model axes: all ranks)."""
        return None if self.mesh is None else dist.group.WORLD

    def axis_group(self, axis: str) -> dist.ProcessGroup | None:
        """The group along one axis, None where the axis has one rank."""
        if self.mesh is None or getattr(self.layout, axis) == 1:
            return None
        return self.mesh[axis].get_group()


def join(meeting: Rendezvous | None, rank: int, layout: Layout, device: torch.device) -> Place:
    """Form the groups of this generation. One rank alone, or no meeting place, forms none."""
    if meeting is None or layout.world == 1:
        return Place(rank, layout, device, None)
    timeout = timedelta(seconds=meeting.timeout_s)
    store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=timeout)
    prefixed = PrefixStore(f"generation-{meeting.generation}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=prefixed, rank=rank, world_size=layout.world, timeout=timeout)
    # Axes of one rank need no group: leaving them out makes a plain data-parallel mesh cost no group of its own.
    axes = tuple(axis for axis in AXES if getattr(layout, axis) > 1)
    mesh = init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=axes)
    return Place(rank, layout, device, mesh)


def leave() -> None:
    """Give up the groups of this generation."""
    if dist.is_initialized():
        dist.destroy_process_group()


def use_interface(name: str) -> None:
    """Make gloo and NCCL talk over one network interface. Must come before the first group."""
    for backend in ("GLOO", "NCCL"):
        os.environ[f"{backend}_SOCKET_IFNAME"] = name
