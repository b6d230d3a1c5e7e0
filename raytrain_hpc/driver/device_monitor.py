"""Health of the GPUs of a node, read in the background, so that it is at hand when a rank fails or becomes slow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from raytrain_hpc.nvml import GpuHealth, read_gpu_health
from raytrain_hpc.runtime.heartbeat import set_thread_name

_INTERVAL_S = 2.0


class DeviceMonitor:
    """Reader of the GPUs of the ranks of a node, every two seconds. Without GPUs that NVML knows, no thread runs."""

    def __init__(self, read: Callable[[str], GpuHealth | None] = read_gpu_health, interval_s: float = _INTERVAL_S):
        """`read`: returns the health of the GPU at a PCI address, None if it cannot be read."""
        self._read, self._interval_s = read, interval_s
        self._addresses: dict[int, str] = {}
        self._health: dict[int, GpuHealth] = {}
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def watch(self, addresses: Mapping[int, str]) -> None:
        """Replace the GPUs that are read. `addresses`: PCI addresses by rank."""
        with self._lock:
            self._health = {
                rank: seen for rank, seen in self._health.items() if addresses.get(rank) == self._addresses[rank]
            }
            self._addresses = dict(addresses)
        if addresses and self._thread is None and self._update():
            self._thread = threading.Thread(target=self._run, name="devices", daemon=True)
            self._thread.start()

    def get_health(self) -> dict[int, GpuHealth]:
        """Return the last readings by rank."""
        with self._lock:
            return dict(self._health)

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()

    def _run(self) -> None:
        set_thread_name("devices")
        while not self._closed.wait(self._interval_s):
            self._update()

    def _update(self) -> bool:
        """Read all GPUs. Return whether any could be read."""
        with self._lock:
            addresses = dict(self._addresses)
        found = {rank: self._read(address) for rank, address in addresses.items()}
        with self._lock:
            for rank, health in found.items():
                if health is not None and self._addresses.get(rank) == addresses[rank]:
                    previous = self._health.get(rank, health)
                    most_links = max(health.nvlinks, previous.nvlinks, previous.nvlinks_before)
                    self._health[rank] = replace(health, nvlinks_before=most_links)
        return any(health is not None for health in found.values())
