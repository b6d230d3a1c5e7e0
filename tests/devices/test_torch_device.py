"""Operations on the device of a process, and what each kind can do."""

from __future__ import annotations

import types

import pytest
import torch

from raytrain_hpc import torch_device
from raytrain_hpc.torch_device import (
    describe_build,
    get_backend,
    get_device_name,
    get_first_device,
    get_memory_gib,
    has_bf16,
    has_float8,
    has_grouped_mm,
    has_varlen_attention,
    is_accelerator,
    restrict_visible_devices,
    set_device,
    synchronize,
)

CPU, GPU, XPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)


def set_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], *, is_rocm: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", "6.4" if is_rocm else None)


@pytest.mark.parametrize(
    ("capability", "is_rocm", "float8", "grouped", "varlen"),
    [
        ((7, 5), False, False, False, False),
        ((8, 0), False, False, False, True),
        ((8, 6), False, False, False, True),
        ((8, 9), False, True, False, True),
        ((9, 0), False, True, True, True),
        ((10, 0), False, True, True, True),
        ((9, 4), True, False, False, True),
    ],
)
def test_kernels_by_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    is_rocm: bool,
    float8: bool,
    grouped: bool,
    varlen: bool,
) -> None:
    set_capability(monkeypatch, capability, is_rocm=is_rocm)
    assert (has_float8(GPU), has_grouped_mm(GPU), has_varlen_attention(GPU)) == (float8, grouped, varlen)
    for device in (CPU, XPU):
        assert not (has_float8(device) or has_grouped_mm(device) or has_varlen_attention(device))


def test_each_device_has_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [get_backend(device).process_group for device in (CPU, GPU, XPU)] == ["gloo", "nccl", "xccl"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert get_backend(GPU).name == "rocm" and get_backend(GPU).visible_variable == "HIP_VISIBLE_DEVICES"


def test_the_first_device_of_each_type() -> None:
    assert [get_first_device(name) for name in ("cpu", "cuda", "xpu")] == [CPU, GPU, XPU]
    assert [is_accelerator(device) for device in (CPU, GPU, XPU)] == [False, True, True]


def test_a_cpu_has_nothing_to_do() -> None:
    synchronize(CPU)
    set_device(CPU, is_deterministic=True)
    assert (get_device_name(CPU), get_memory_gib(CPU), has_bf16(CPU)) == ("cpu", None, False)


def test_intel_gpus_are_used_through_their_module(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    module = types.SimpleNamespace(
        synchronize=lambda device: calls.append(("synchronize", device)),
        set_device=lambda device: calls.append(("set_device", device)),
        reset_peak_memory_stats=lambda device: calls.append(("reset", device)),
        get_device_name=lambda device: "Intel(R) Data Center GPU Max 1550",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=64 << 30),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: {"xpu": module}[name])
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    set_device(XPU, is_deterministic=True)
    synchronize(XPU)
    assert calls == [("set_device", XPU), ("reset", XPU), ("synchronize", XPU)]
    assert "CUBLAS_WORKSPACE_CONFIG" not in torch_device.os.environ
    assert (get_device_name(XPU), get_memory_gib(XPU)) == ("Intel(R) Data Center GPU Max 1550", 64.0)


@pytest.mark.parametrize(
    ("device", "ids", "before", "after"),
    [
        (XPU, [7], {}, {"ZE_AFFINITY_MASK": "7"}),
        (XPU, [7], {"ZE_AFFINITY_MASK": ""}, {"ZE_AFFINITY_MASK": "7"}),
        (XPU, [7], {"ZE_AFFINITY_MASK": "7"}, {"ZE_AFFINITY_MASK": "7"}),  # set by Ray
        (XPU, [3], {"ZE_AFFINITY_MASK": "0,1,2,3"}, {"ZE_AFFINITY_MASK": "3"}),  # of the node
        (GPU, [3], {"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        (GPU, ["GPU-8a6b"], {"CUDA_VISIBLE_DEVICES": "GPU-8a6b"}, {"CUDA_VISIBLE_DEVICES": "GPU-8a6b"}),
        (
            XPU,
            [3],
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"},
            {"ONEAPI_DEVICE_SELECTOR": "level_zero:3"},
        ),  # by Ray 2.50
        (XPU, [], {}, {}),
        (CPU, [], {}, {}),
    ],
)
def test_a_worker_sees_the_device_that_ray_has_assigned(
    device: torch.device, ids: list[int | str], before: dict[str, str], after: dict[str, str]
) -> None:
    environment = dict(before)
    restrict_visible_devices(device, ids, environment)
    assert environment == after


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"cuda": "12.8"}, "CUDA 12.8"),
        ({"hip": "6.4.1"}, "ROCm 6.4.1"),
        ({"xpu": "20250100"}, "XPU 20250100"),
        ({}, ""),
    ],
)
def test_the_build_of_torch_is_named(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: str) -> None:
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, versions.get(name), raising=False)
    assert describe_build() == expected
