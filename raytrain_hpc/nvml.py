"""Facts about a GPU of NVIDIA from its driver, by NVML (package nvidia-ml-py, module pynvml, which need not be there).

NVML needs no CUDA context, so that any process of a node can ask about a GPU whose own process hangs or has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, TypeVar

T = TypeVar("T")
# Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a GPU down for the sake of its hardware.
_SLOWDOWNS = {
    0x4: "at its power limit",
    0x8: "slowed down by hardware",
    0x20: "too hot (driver)",
    0x40: "too hot (hardware)",
    0x80: "slowed down by the power supply",
}
_MAX_NVLINKS = 36  # of any GPU so far
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


@dataclass(frozen=True)
class GpuHealth:
    """State of a GPU. A value is None where the driver does not tell.

    `power_w`, `power_limit_w`; `sm_mhz`, `max_sm_mhz`: clock of the multiprocessors; `temperature_c`; `slowdowns`: why
    the clock is lowered now; `uncorrected_ecc`: memory errors since the driver was loaded; `remap_failed`,
    `remap_pending`: rows of memory could not be replaced, or will be at the next reset; `pcie`, `max_pcie`:
    (generation, lanes); `nvlinks`: links that are active, `nvlinks_before`: the most that were. A card can have links
    that lead nowhere.
    """

    power_w: float | None = None
    power_limit_w: float | None = None
    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    temperature_c: int | None = None
    slowdowns: tuple[str, ...] = ()
    uncorrected_ecc: int | None = None
    remap_failed: bool = False
    remap_pending: bool = False
    pcie: tuple[int, int] | None = None
    max_pcie: tuple[int, int] | None = None
    nvlinks: int = 0
    nvlinks_before: int = 0

    def list_problems(self) -> list[str]:
        """Return what is wrong with the GPU, in words; empty if nothing is known to be."""
        problems = list(self.slowdowns)
        if self.uncorrected_ecc:
            problems.append(f"{self.uncorrected_ecc} uncorrected ECC errors")
        if self.remap_failed:
            problems.append("memory rows that could not be remapped")
        if self.remap_pending:
            problems.append("memory rows to be remapped at the next reset")
        # The generation of an idle link is lowered to save power, the number of lanes is not.
        if self.pcie is not None and self.max_pcie is not None and self.pcie[1] < self.max_pcie[1]:
            problems.append(f"PCIe with {self.pcie[1]} of {self.max_pcie[1]} lanes")
        if self.nvlinks < self.nvlinks_before:
            problems.append(f"{self.nvlinks_before - self.nvlinks} of {self.nvlinks_before} NVLinks down")
        return problems

    def describe(self) -> str:
        """Return one line: power, clock and temperature, then the problems. Empty if nothing is known."""
        parts = [
            _of("{:.0f}", self.power_w, self.power_limit_w, " W"),
            _of("SM {:.0f}", self.sm_mhz, self.max_sm_mhz, " MHz"),
            "" if self.temperature_c is None else f"{self.temperature_c} C",
            *self.list_problems(),
        ]
        return ", ".join(part for part in parts if part)


def read_gpu_health(pci_address: str) -> GpuHealth | None:
    """Return the state of a GPU by its PCI address, None if NVML or the GPU cannot be reached."""
    with _open_device(pci_address) as (nvml, gpu):
        if nvml is None:
            return None
        reasons = _try(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)) or 0
        power = _try(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu))
        limit = _try(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu))
        _, _, pending, failed = _try(nvml, lambda: nvml.nvmlDeviceGetRemappedRows(gpu)) or (0, 0, 0, 0)
        links = [_try(nvml, _bind_link(nvml, gpu, link)) for link in range(_MAX_NVLINKS)]
        return GpuHealth(
            power_w=None if power is None else power / 1000,
            power_limit_w=None if limit is None else limit / 1000,
            sm_mhz=_try(nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            max_sm_mhz=_try(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            temperature_c=_try(nvml, lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            slowdowns=tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit),
            uncorrected_ecc=_try(nvml, lambda: _read_uncorrected_errors(nvml, gpu)),
            remap_failed=bool(failed),
            remap_pending=bool(pending),
            pcie=_try(
                nvml, lambda: (nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu), nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu))
            ),
            max_pcie=_try(
                nvml, lambda: (nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu))
            ),
            nvlinks=links.count(1),
        )


def find_nvlink_domain(pci_address: str) -> str:
    """Return the NVLink domain of a GPU, whose GPUs reach each other by NVLink across nodes; "" if it has none.

    Named by the cluster UUID and the clique of its fabric (NVL36, NVL72).
    """
    with _open_device(pci_address) as (nvml, gpu):
        if nvml is None:
            return ""
        info = _try(nvml, lambda: nvml.c_nvmlGpuFabricInfo_v2_t())
        is_read = _try(nvml, lambda: nvml.nvmlDeviceGetGpuFabricInfoV(gpu, info)) is not None
        if info is None or not is_read or info.state != _FABRIC_COMPLETED:
            return ""
        uuid = bytes(info.clusterUuid)
        return f"nvlink-{uuid.hex()}-{info.cliqueId}" if any(uuid) else ""


@contextmanager
def _open_device(pci_address: str) -> Iterator[tuple[Any, Any]]:
    """Yield the module and a handle of the GPU, or twice None if there is no such thing."""
    if not pci_address or find_spec("pynvml") is None:
        yield None, None
        return
    import pynvml

    if _try(pynvml, lambda: pynvml.nvmlInit() or True) is None:
        yield None, None
        return
    try:
        gpu = _try(pynvml, lambda: pynvml.nvmlDeviceGetHandleByPciBusId(pci_address.encode()))
        yield (None, None) if gpu is None else (pynvml, gpu)
    finally:
        _try(pynvml, pynvml.nvmlShutdown)


def _read_uncorrected_errors(nvml: Any, gpu: Any) -> int:
    kind, since_load = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return int(nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, since_load))


def _try(nvml: Any, read: Callable[[], T]) -> T | None:
    """Return what `read` returns, None if the driver, the GPU or the version of the package does not support it."""
    try:
        return read()
    except (nvml.NVMLError, AttributeError):
        return None


def _bind_link(nvml: Any, gpu: Any, link: int) -> Callable[[], int]:
    return lambda: int(nvml.nvmlDeviceGetNvLinkState(gpu, link))


def _of(form: str, value: float | None, limit: float | None, unit: str) -> str:
    if value is None:
        return ""
    return form.format(value) + ("" if limit is None else f" of {limit:.0f}") + unit
