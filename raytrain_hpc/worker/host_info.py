"""Facts about a worker's process and host, for `doctor` and for the record of a run."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from raytrain_hpc.cpu_limits import read_cpu_limits
from raytrain_hpc.device_backends import count_installed_accelerators
from raytrain_hpc.torch_device import describe_build, is_accelerator, synchronize
from raytrain_hpc.worker.directory_access import check_directory_access
from raytrain_hpc.worker.host_topology import list_adapters

_PACKAGES = ("raytrain-hpc", "torch", "ray", "numpy", "pyarrow")
_CONNECT_TIMEOUT_S = 5.0
_MATRIX_SIZE, _MATRIX_SIZE_OF_ACCELERATOR = 512, 8192  # rows of the square matrices that are multiplied
_COPY_BYTES, _COPY_BYTES_OF_ACCELERATOR = 1 << 26, 1 << 30


def collect_host_info(device: torch.device, path: str, marker: str, driver: tuple[str, int]) -> dict[str, Any]:
    """Return versions, clock, CPUs, GPUs, limits and device speed.

    `directory`: a DirectoryAccess as a dict, from the file at `path`, which should contain `marker`; `reaches_driver`:
    whether a connection to a port of the driver succeeds.
    """
    cpus, shared_memory = read_cpu_limits(), shutil.disk_usage("/dev/shm")
    return {
        "python": platform.python_version(),
        "versions": {name: get_package_version(name) for name in _PACKAGES},
        "time": time.time(),
        "cpus": {**asdict(cpus), "usable": cpus.usable},
        "installed_gpus": count_installed_accelerators(),
        "accelerator_build": describe_build(),
        "adapters": [asdict(adapter) for adapter in list_adapters()],
        "shared_memory_free": shared_memory.free,
        "shared_memory_total": shared_memory.total,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "directory": asdict(check_directory_access(path, marker)),
        "reaches_driver": _can_connect(driver),
        "tflops": _measure_tflops(device),
        "memory_gbs": _measure_memory_gbs(device),
    }


def _can_connect(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


def describe_process() -> dict[str, Any]:
    """Return the versions that this process runs, and the CPU of its host, for workers.json."""
    versions = {"python": platform.python_version()} | {name: get_package_version(name) for name in _PACKAGES}
    return {"versions": versions, "cpu": _get_cpu_name()}


def _get_cpu_name() -> str:
    """Return the CPU model as Linux names it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def get_package_version(name: str) -> str:
    """Return the version of an installed package, or "missing".

    That of torch with its build, "2.15.0+cu132", which the package's metadata may leave out.
    """
    if name == "torch":
        return str(torch.__version__)
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _measure_tflops(device: torch.device) -> float:
    """Return the TFLOP/s of a large matrix product: in bf16 on a GPU, in fp32 on a CPU."""
    side, dtype = _MATRIX_SIZE, torch.float32
    if is_accelerator(device):
        side, dtype = _MATRIX_SIZE_OF_ACCELERATOR, torch.bfloat16
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _time_best(lambda: a @ b, device) / 1e12


def _measure_memory_gbs(device: torch.device) -> float:
    """Return the GB/s that a copy reads and writes."""
    size = _COPY_BYTES_OF_ACCELERATOR if is_accelerator(device) else _COPY_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _time_best(lambda: target.copy_(source), device) / 1e9


def _time_best(operation: Any, device: torch.device) -> float:
    """Return the seconds of the fastest of five runs."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        operation()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)
