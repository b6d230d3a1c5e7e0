"""Operations of torch on the device of a process, whatever its kind, and what the kind can do."""

from __future__ import annotations

import os
import resource
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from raytrain_hpc.device_backends import BACKENDS, CPU, Capability, DeviceBackend


def get_backend(device: torch.device) -> DeviceBackend:
    """Return the kind of a device in this process. One that is not listed, such as "meta", counts as a CPU."""
    if device.type == BACKENDS["cuda"].device_type and torch.version.hip is not None:
        return BACKENDS["rocm"]
    return BACKENDS.get(device.type, CPU)


def get_first_device(device_type: str) -> torch.device:
    """Return the device of a process that sees one device of a type."""
    return torch.device(device_type) if device_type == CPU.device_type else torch.device(device_type, 0)


def find_accelerator() -> torch.device | None:
    """Return the first accelerator that this process can use, None if there is none."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type not in BACKENDS else torch.device(device.type, 0)


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device is not the CPU."""
    return device.type != CPU.device_type


def is_on_accelerator(tensor: Tensor) -> bool:
    """Return whether the data of a tensor is in the memory of an accelerator."""
    return tensor.device.type not in (CPU.device_type, "meta")


def get_device_module(device: torch.device) -> Any:
    """Return torch's module for an accelerator, such as `torch.cuda`.

    All of them have Stream, Event, stream, current_stream, synchronize, set_device, manual_seed, get_rng_state,
    set_rng_state, empty_cache, get_device_name, get_device_properties and the functions of the memory allocator.
    """
    return torch.get_device_module(device.type)


def synchronize(device: torch.device) -> None:
    """Wait for the work queued on an accelerator. Does nothing on a CPU."""
    if is_accelerator(device):
        get_device_module(device).synchronize(device)


def set_device(device: torch.device, *, is_deterministic: bool) -> None:
    """Make an accelerator the current device of this process, and reset its peak of memory. Products are exact fp32.

    Call before any tensor is created. Does nothing on a CPU. `is_deterministic`: torch is set to deterministic kernels.
    """
    if not is_accelerator(device):
        return
    backend, module = get_backend(device), get_device_module(device)
    if backend.process_group == "nccl":
        if is_deterministic:  # read when the first cuBLAS handle is created; without it torch refuses cuBLAS
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.matmul.allow_tf32 = False
    module.set_device(device)
    module.reset_peak_memory_stats(device)


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator of an accelerator. Does nothing on a CPU, whose generator is torch's default one."""
    if is_accelerator(device):
        get_device_module(device).manual_seed(seed)


def get_device_name(device: torch.device) -> str:
    """Return the vendor's name of an accelerator, or "cpu"."""
    return str(get_device_module(device).get_device_name(device)) if is_accelerator(device) else CPU.device_type


def get_memory_gib(device: torch.device) -> float | None:
    """Return the memory of an accelerator in GiB, None for a CPU."""
    if not is_accelerator(device):
        return None
    return float(get_device_module(device).get_device_properties(device).total_memory / 2**30)


def get_pci_address(device: torch.device) -> str:
    """Return where an accelerator is on the PCI bus, such as "0000:18:00.0", "" if torch does not know."""
    if not is_accelerator(device):
        return ""
    properties = get_device_module(device).get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    return "" if bus < 0 else f"{domain:04x}:{bus:02x}:{number:02x}.0"


def get_peak_memory_gib(device: torch.device) -> float:
    """Return the peak of allocated device memory in GiB; on a CPU, the peak resident memory of this process."""
    if is_accelerator(device):
        return float(get_device_module(device).max_memory_allocated(device) / 2**30)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def has_bf16(device: torch.device) -> bool:
    """Return whether a device is an accelerator that computes in bf16."""
    return is_accelerator(device) and bool(get_device_module(device).is_bf16_supported(including_emulation=False))


def has_float8(device: torch.device) -> bool:
    """Return whether an accelerator multiplies e4m3 and e5m2 numbers in the formats of NVIDIA."""
    return _reaches(device, get_backend(device).float8)


def has_grouped_mm(device: torch.device) -> bool:
    """Return whether torch multiplies groups of rows in one kernel. On other devices it reads their sizes first."""
    return _reaches(device, get_backend(device).grouped_mm)


def has_varlen_attention(device: torch.device) -> bool:
    """Return whether torch has a FlashAttention for sequences of different lengths in one row."""
    return _reaches(device, get_backend(device).varlen_attention)


def has_flash_attention_3(device: torch.device) -> bool:
    """Return whether FlashAttention-3 supports a device: Hopper."""
    return get_backend(device).name == "cuda" and get_device_module(device).get_device_capability(device)[0] == 9


def _reaches(device: torch.device, capability: Capability | None) -> bool:
    return capability is not None and get_device_module(device).get_device_capability(device) >= capability


def has_attention_kernels(device: torch.device) -> bool:
    """Return whether torch has several kernels for attention on a device, among which a process can choose."""
    return is_accelerator(device) and get_backend(device).process_group == "nccl"


def enable_cudnn_attention(enabled: bool) -> None:
    """Let torch choose cuDNN's kernel for attention, or keep it from it."""
    torch.backends.cuda.enable_cudnn_sdp(enabled)


def get_nvtx(device: torch.device) -> Any:
    """Return the module for ranges in NVIDIA's and AMD's profilers, None where torch has none for a device."""
    return getattr(get_device_module(device), "nvtx", None)


def describe_build() -> str:
    """Return for which accelerators torch is built: such as "CUDA 12.8", "ROCm 6.4", "XPU", or "" for none."""
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda is not None:
        return f"CUDA {torch.version.cuda}"
    return f"XPU {torch.version.xpu}" if torch.version.xpu is not None else ""


def restrict_visible_devices(
    device: torch.device, ids: Sequence[int | str], environment: MutableMapping[str, str] = os.environ
) -> None:
    """Let this process see the devices that Ray has assigned to it. Call before the first use of the device.

    Ray does this itself for the vendor that it detects. Without the package `dpctl` it detects no GPUs of Intel, but it
    can be told their number. `ids`: of the devices, as Ray numbers them. Does nothing on a CPU.
    """
    if not is_accelerator(device) or not ids:
        return
    variable = get_backend(device).visible_variable
    if environment.get("ONEAPI_DEVICE_SELECTOR", "").startswith("level_zero:"):
        return  # set by Ray up to 2.55, in whose numbering a mask would change the devices
    if len(environment.get(variable, "").split(",")) != len(ids) or not environment.get(variable):
        environment[variable] = ",".join(map(str, ids))
