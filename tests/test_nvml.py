"""Health of GPUs and NVLink domains, by a stand-in for NVML with its numbers and errors."""

from __future__ import annotations

import ctypes
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raytrain_hpc.nvml import GpuHealth, find_nvlink_domain, read_gpu_health

ADDRESS = "0000:18:00.0"


class NVMLError(Exception):
    pass


class FabricInfo(ctypes.Structure):
    _fields_ = [("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32), ("state", ctypes.c_uint)]


def unsupported(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def find_device(address: bytes) -> str:
    return "gpu" if address == ADDRESS.encode() else unsupported()


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that knows one healthy GPU: a dict of the values that its functions return."""
    module: Any = types.ModuleType("pynvml")
    module.__spec__ = types.SimpleNamespace()
    module.NVMLError, module.c_nvmlGpuFabricInfo_v2_t = NVMLError, FabricInfo
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU, module.NVML_NVLINK_MAX_LINKS = 1, 0, 20
    module.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, module.NVML_VOLATILE_ECC = 1, 0
    module.open = 0

    def count(change: int) -> Callable[[], None]:
        return lambda: setattr(module, "open", module.open + change)

    module.nvmlInit, module.nvmlShutdown = count(1), count(-1)
    module.nvmlDeviceGetHandleByPciBusId = find_device
    values = {"CurrentClocksEventReasons": 1, "PowerUsage": 690_500, "EnforcedPowerLimit": 700_000}
    values |= {"ClockInfo": 1755, "MaxClockInfo": 1980, "Temperature": 63, "TotalEccErrors": 0}
    values |= {"CurrPcieLinkGeneration": 5, "CurrPcieLinkWidth": 16, "MaxPcieLinkGeneration": 5}
    module.values = values | {"MaxPcieLinkWidth": 16, "RemappedRows": (0, 0, 0, 0)}
    for name in module.values:
        setattr(module, f"nvmlDeviceGet{name}", lambda gpu, *_, name=name: module.values[name])
    module.links = [1] * 18
    module.nvmlDeviceGetNvLinkState = lambda gpu, link: module.links[link] if link < 18 else unsupported()
    module.nvmlDeviceGetGpuFabricInfoV = unsupported
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_a_healthy_gpu(nvml: Any) -> None:
    health = read_gpu_health(ADDRESS)
    assert health is not None and health.list_problems() == [] and nvml.open == 0
    assert health.describe() == "690 of 700 W, SM 1755 of 1980 MHz, 63 C"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"CurrentClocksEventReasons": 0x44}, "at its power limit, too hot (hardware)"),
        ({"CurrentClocksEventReasons": 0x80}, "slowed down by the power supply"),
        ({"TotalEccErrors": 2}, "2 uncorrected ECC errors"),
        ({"RemappedRows": (1, 0, 1, 0)}, "memory rows to be remapped at the next reset"),
        ({"RemappedRows": (0, 1, 0, 1)}, "memory rows that could not be remapped"),
        ({"CurrPcieLinkWidth": 4}, "PCIe with 4 of 16 lanes"),
    ],
)
def test_problems_are_named(nvml: Any, values: dict[str, Any], problem: str) -> None:
    nvml.values |= values
    health = read_gpu_health(ADDRESS)
    assert health is not None and ", ".join(health.list_problems()) == problem
    assert health.describe() == f"690 of 700 W, SM 1755 of 1980 MHz, 63 C, {problem}"


def test_links_that_were_up_before_are_missed_and_others_not(nvml: Any) -> None:
    nvml.links[3] = nvml.links[7] = 0  # as of a card with a bridge for some of its links
    health = read_gpu_health(ADDRESS)
    assert health is not None and health.nvlinks == 16 and health.list_problems() == []
    assert replace(health, nvlinks_before=18).list_problems() == ["2 of 18 NVLinks down"]


NEWER_NAMES = ["nvmlDeviceGetCurrentClocksEventReasons", "c_nvmlGpuFabricInfo_v2_t", "nvmlDeviceGetGpuFabricInfoV"]


@pytest.mark.parametrize("name", [*NEWER_NAMES, "nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState"])
def test_an_older_package_lacks_some_functions(nvml: Any, name: str) -> None:
    """pynvml 11.5 has none of the newer ones."""
    delattr(nvml, name)
    assert find_nvlink_domain(ADDRESS) == ""
    health = read_gpu_health(ADDRESS)
    assert health is not None and health.temperature_c == 63 and nvml.open == 0


def test_a_driver_that_ends_meanwhile_is_no_error(nvml: Any) -> None:
    nvml.nvmlShutdown = unsupported
    assert read_gpu_health(ADDRESS) is not None and find_nvlink_domain(ADDRESS) == ""


def test_an_idle_link_with_fewer_transfers_per_second_is_no_problem(nvml: Any) -> None:
    nvml.values["CurrPcieLinkGeneration"] = 1
    health = read_gpu_health(ADDRESS)
    assert health is not None and health.list_problems() == []


def test_what_a_driver_does_not_tell_is_left_out(nvml: Any) -> None:
    """As of a MIG slice."""
    for name in nvml.values:
        setattr(nvml, f"nvmlDeviceGet{name}", unsupported)
    nvml.nvmlDeviceGetNvLinkState = unsupported
    assert read_gpu_health(ADDRESS) == GpuHealth() and GpuHealth().describe() == ""
    assert nvml.open == 0


def test_without_gpu_or_driver_nothing_is_known(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpu_health("0000:99:00.0") is None and find_nvlink_domain("0000:99:00.0") == "" == find_nvlink_domain(
        ""
    )
    monkeypatch.setattr(nvml, "nvmlInit", unsupported)
    assert read_gpu_health(ADDRESS) is None and nvml.open == 0
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpu_health("") is None


@pytest.mark.parametrize(
    ("uuid", "state", "domain"),
    [
        (bytes(range(16)), 3, "nvlink-000102030405060708090a0b0c0d0e0f-7"),
        (bytes(16), 3, ""),  # a host with NVLink inside only
        (bytes(range(16)), 2, ""),  # not registered with the fabric yet
    ],
)
def test_nvlink_domains_by_fabric(nvml: Any, uuid: bytes, state: int, domain: str) -> None:
    def fill(gpu: str, info: FabricInfo) -> int:
        info.clusterUuid[:] = list(uuid)
        info.state, info.cliqueId = state, 7
        return 0

    nvml.nvmlDeviceGetGpuFabricInfoV = fill
    assert find_nvlink_domain(ADDRESS) == domain
    nvml.nvmlDeviceGetGpuFabricInfoV = unsupported
    assert find_nvlink_domain(ADDRESS) == ""
