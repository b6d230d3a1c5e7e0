"""The kinds of devices: names, and what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_hpc.device_backends import (
    BACKENDS,
    find_device_type,
    find_without_float8,
    get_ray_resource,
    get_usual_preset,
    has_endless_kernel,
    have_bf16,
    is_accelerator_type,
    set_network_interface,
    set_worker_environment,
)


@pytest.mark.parametrize(
    ("model", "device_type"),
    [
        ("H100", "cuda"),
        ("NVIDIA-GB200", "cuda"),
        ("AMD-Instinct-MI250X-MI250", "cuda"),
        ("Intel-GPU-Max-1550", "xpu"),
        ("an unknown one", "cuda"),
    ],
)
def test_device_types_by_rays_names(model: str, device_type: str) -> None:
    assert find_device_type(model) == device_type


def test_what_models_lack() -> None:
    assert have_bf16(["A100", "Intel-GPU-Max-1550"]) and not have_bf16(["A100", "T4"])
    names = ["H100", "A100-80G", "AMD-Instinct-MI300X-OAM", "Intel-GPU-Max-1550", "L4"]
    assert find_without_float8(names) == tuple(names[1:4])


def test_types_and_resources() -> None:
    assert [is_accelerator_type(name) for name in ("auto", "cpu", "cuda", "xpu")] == [False, False, True, True]
    assert [get_ray_resource(name) for name in ("auto", "cpu", "cuda", "xpu")] == ["GPU", "CPU", "GPU", "GPU"]
    assert [has_endless_kernel(name) for name in ("cpu", "cuda", "xpu")] == [False, True, False]
    assert [get_usual_preset(name) for name in ("auto", "cpu", "cuda", "xpu")] == ["h100", "cpu", "h100", "pvc-tile"]


def test_a_workers_environment_keeps_what_is_set() -> None:
    environment = {"PATH": "/bin"}
    set_worker_environment(environment)
    assert environment == {"PATH": "/bin", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    set_worker_environment(environment)
    assert environment == {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}


def test_network_interfaces_of_all_backends() -> None:
    environment: dict[str, str] = {}
    set_network_interface("hsn0,hsn1", environment)
    assert environment == {
        "GLOO_SOCKET_IFNAME": "hsn0,hsn1",
        "NCCL_SOCKET_IFNAME": "hsn0,hsn1",
        "CCL_KVS_IFACE": "hsn0",
    }


def add_device(sysfs: Path, number: int, vendor: str, address: str) -> None:
    """Add a device to a copy of /sys/class/drm, in which devices are links to their place on the bus."""
    device = sysfs / "devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    node = sysfs / "class" / f"renderD{number}"
    node.mkdir(parents=True)
    (sysfs / "dri").mkdir(exist_ok=True)
    (sysfs / "dri" / node.name).touch()
    (node / "device").symlink_to(device)


def test_installed_devices_are_counted_by_vendor(tmp_path: Path) -> None:
    add_device(tmp_path, 128, "0x8086", "0000:00:02.0")  # of the processor
    for number, address in enumerate(("0000:18:00.0", "0000:42:00.0"), 129):
        add_device(tmp_path, number, "0x8086", address)
    add_device(tmp_path, 131, "0x1002", "0000:c1:00.0")
    (tmp_path / "class" / "card0").mkdir()
    places = tmp_path / "class", tmp_path / "dri"
    counts = {name: backend.count_installed(*places) for name, backend in BACKENDS.items()}
    assert counts == {"cpu": 0, "cuda": 0, "rocm": 1, "xpu": 2}
    (tmp_path / "dri" / "renderD130").unlink()  # not given to this container
    assert BACKENDS["xpu"].count_installed(*places) == 1
    assert BACKENDS["xpu"].count_installed(tmp_path / "none", tmp_path / "dri") == 0
