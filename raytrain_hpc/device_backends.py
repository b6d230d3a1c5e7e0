"""The kinds of devices, and what torch, Ray and the vendors' libraries call them.

Only this file, `torch_device.py` and the files of torch's private names know the kinds. All others ask whether a device
is an accelerator, or for a property that is listed here.
"""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DeviceType = Literal["cpu", "cuda", "xpu"]  # torch's names
DeviceChoice = Literal["auto", "cpu", "cuda", "xpu"]  # of cluster.device
Capability = tuple[int, int]  # compute capability of a GPU: major, minor

_WITHOUT_BF16 = re.compile(r"K80|P4|P100|T4|V100")  # Ray's names of GPUs older than Ampere
_WITHOUT_FLOAT8 = re.compile(r"K80|P4|P100|T4|V100|A10G|A100(-\d+G)?|AMD-.*|Intel-.*")  # and those of other formats
_LIBRARY_ERROR = re.compile(
    r"\b(CUDA|HIP|XPU|cuDNN|MIOpen|cusolver|cuFFT) error\b|\b(CUBLAS|HIPBLAS|CUDNN)_STATUS_", re.IGNORECASE
)
_INTEGRATED_GPU = "0000:00:02.0"  # the PCI address at which processors have theirs
_SYSFS_DRM, _DEV_DRI = Path("/sys/class/drm"), Path("/dev/dri")


@dataclass(frozen=True)
class DeviceBackend:
    """A kind of device.

    `device_type`: torch's name. `process_group`: backend of torch.distributed. `interface_variable`: environment
    variable that selects its network interface. `resource`: what Ray calls a device. `preset`: the one in
    planner/hardware.py that a plan assumes if none is named. `ray_prefix`: of Ray's names of models.
    `visible_variable`: environment variable that lists the devices which a process sees. `pci_vendor`: its number in
    hexadecimal. `float8`, `grouped_mm`, `varlen_attention`: compute capability from which on torch has a kernel for it;
    None: on no device. `environment`: variables of a worker, unless they are set. `failure_texts`: in exceptions of its
    collectives. `takes_interfaces`: `interface_variable` can name several. `has_endless_kernel`: torch has a kernel
    that only waits.
    """

    name: str
    device_type: DeviceType
    process_group: str
    resource: str
    preset: str
    interface_variable: str = ""
    ray_prefix: str = ""
    visible_variable: str = ""
    pci_vendor: str = ""
    float8: Capability | None = None
    grouped_mm: Capability | None = None
    varlen_attention: Capability | None = None
    environment: tuple[tuple[str, str], ...] = ()
    failure_texts: tuple[str, ...] = ()
    takes_interfaces: bool = True
    has_endless_kernel: bool = False

    def count_installed(self, sysfs: Path = _SYSFS_DRM, dev: Path = _DEV_DRI) -> int:
        """Return how many devices of this kind this process may open, whether or not torch and Ray can use them.

        A container sees those of the whole host in /sys, and in /dev those that it was given.
        """
        if not self.pci_vendor:
            return 0
        nodes = [node for node in sysfs.glob("renderD*") if os.access(dev / node.name, os.R_OK | os.W_OK)]
        return sum(
            vendor.read_text().strip() == self.pci_vendor and vendor.parent.resolve().name != _INTEGRATED_GPU
            for node in nodes
            if (vendor := node / "device" / "vendor").is_file()
        )


CPU = DeviceBackend(
    "cpu", "cpu", "gloo", "CPU", "cpu", interface_variable="GLOO_SOCKET_IFNAME", failure_texts=("gloo",)
)
BACKENDS = {
    backend.name: backend
    for backend in (
        CPU,
        DeviceBackend(
            "cuda",
            "cuda",
            "nccl",
            "GPU",
            "h100",
            interface_variable="NCCL_SOCKET_IFNAME",
            visible_variable="CUDA_VISIBLE_DEVICES",
            pci_vendor="0x10de",
            float8=(8, 9),  # Ada; Hopper is 9.0
            grouped_mm=(9, 0),
            varlen_attention=(8, 0),
            environment=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),),  # the driver decides which rank has failed
            failure_texts=("NCCL",),
            has_endless_kernel=True,
        ),
        # ROCm presents itself as CUDA, and RCCL as NCCL. Its float8 formats are others up to MI300.
        DeviceBackend(
            "rocm",
            "cuda",
            "nccl",
            "GPU",
            "mi300x",
            interface_variable="NCCL_SOCKET_IFNAME",
            ray_prefix="AMD-",
            visible_variable="HIP_VISIBLE_DEVICES",
            pci_vendor="0x1002",
            varlen_attention=(8, 0),
            environment=(("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),),
            failure_texts=("NCCL",),
            has_endless_kernel=True,
        ),
        # Aborting groups of xccl hangs (torch 2.11, torch-xpu-ops issue 3378): their ranks are replaced after a fault.
        DeviceBackend(
            "xpu",
            "xpu",
            "xccl",
            "GPU",
            "pvc-tile",
            interface_variable="CCL_KVS_IFACE",
            ray_prefix="Intel-",
            visible_variable="ZE_AFFINITY_MASK",
            pci_vendor="0x8086",
            failure_texts=("XCCL", "oneCCL"),
            takes_interfaces=False,
        ),
    )
}

_DEFAULT = BACKENDS["cuda"]  # accelerators that are not known by their name


def is_accelerator_type(device_type: str) -> bool:
    """Return whether a device type, or a value of cluster.device, names an accelerator. "auto" does not."""
    return device_type not in ("auto", CPU.device_type)


def get_ray_resource(device_type: str) -> str:
    """Return Ray's name of the resource that a worker takes one of. "auto": of an accelerator."""
    return _get_first(device_type).resource


def get_usual_preset(device_type: str) -> str:
    """Return the name of the device in planner/hardware.py to assume for a type. "auto": an accelerator."""
    return _get_first(device_type).preset


def has_endless_kernel(device_type: str) -> bool:
    """Return whether a kernel that never ends can be injected on a type of device."""
    return _get_first(device_type).has_endless_kernel


def _get_first(device_type: str) -> DeviceBackend:
    return next((backend for backend in BACKENDS.values() if backend.device_type == device_type), _DEFAULT)


def find_device_type(model: str) -> str:
    """Return the type of an accelerator from Ray's name of its model, such as "H100" or "Intel-GPU-Max-1550"."""
    prefixes = {backend.ray_prefix: backend.device_type for backend in BACKENDS.values() if backend.ray_prefix}
    return next((kind for prefix, kind in prefixes.items() if model.startswith(prefix)), _DEFAULT.device_type)


def have_bf16(models: Sequence[str]) -> bool:
    """Return whether all accelerators compute in bf16. `models`: Ray's names; unknown ones are assumed to."""
    return not any(_WITHOUT_BF16.fullmatch(model) for model in models)


def find_without_float8(models: Sequence[str]) -> tuple[str, ...]:
    """Return those of Ray's names of accelerators that are known not to compute in float8."""
    return tuple(model for model in models if _WITHOUT_FLOAT8.fullmatch(model))


def set_network_interface(names: str, environment: MutableMapping[str, str]) -> None:
    """Make the collectives of all kinds of devices use network interfaces, given by name, separated by commas."""
    for backend in BACKENDS.values():
        environment[backend.interface_variable] = names if backend.takes_interfaces else names.partition(",")[0]


def set_worker_environment(environment: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads in a worker, unless they are set. Call before torch is imported."""
    for name, value in (pair for backend in BACKENDS.values() for pair in backend.environment):
        environment.setdefault(name, value)


def count_installed_accelerators() -> int:
    """Return how many accelerators this host has, whether or not torch and Ray can use them."""
    # In a container, NVIDIA's devices may be missing from /sys, and appear in /dev only.
    numbered = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return max(numbered, sum(backend.count_installed() for backend in BACKENDS.values()))


def is_device_error(text: str) -> bool:
    """Return whether the text of a RuntimeError comes from a device or one of its libraries, such as cuBLAS."""
    return _LIBRARY_ERROR.search(text) is not None
