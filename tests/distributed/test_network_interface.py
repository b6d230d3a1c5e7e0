"""Interfaces by IPv4 and IPv6 address, compared with what the kernel reports, and the setting's validation."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.distributed.network_interface import check_interface, choose_interface, find_interface
from raytrain_hpc.errors import ConfigError

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "ib0": [(socket.AF_INET6, "fe80::5%ib0"), (socket.AF_INET6, "fd00:0:0::7"), (socket.AF_PACKET, "aa:bb")],
    "eth0": [(socket.AF_INET, "10.0.0.7")],
    "bare0": [(socket.AF_PACKET, "aa:cc")],
}


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {name: [SimpleNamespace(family=f, address=a) for f, a in found] for name, found in INTERFACES.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: entries)


def make_config(interface: str) -> Any:
    return load_config(None, [f"cluster.network_interface={interface}"])


@pytest.mark.parametrize(
    ("address", "name"),
    [("10.0.0.7", "eth0"), ("fd00::7", "ib0"), ("FE80::5", "ib0"), ("0:0:0:0:0:0:0:1", "lo"), ("10.0.0.8", None)],
)
def test_interface_is_found_by_address(interfaces: None, address: str, name: str | None) -> None:
    assert find_interface(address) == name
    assert choose_interface(make_config("auto"), address) == name


def test_chosen_interface_must_exist_and_have_an_address(interfaces: None) -> None:
    assert choose_interface(make_config("ib0"), "10.0.0.7") == "ib0"
    assert choose_interface(make_config("ib0,eth0"), "10.0.0.7") == "ib0,eth0"
    for name in ("ib1", "bare0", "ib0,ib1", ""):
        with pytest.raises(ConfigError, match=r"interface='.*' \(load_config\): .*; it has eth0, ib0, lo$"):
            check_interface(make_config(name))


def test_loopback_interface_of_this_machine() -> None:
    assert find_interface("127.0.0.1") == "lo"
    with_ipv6 = Path("/proc/net/if_inet6")
    has_loopback = with_ipv6.exists() and "lo" in with_ipv6.read_text().split()
    assert find_interface("::1") == ("lo" if has_loopback else None)
