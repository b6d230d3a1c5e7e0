"""The network interface for collectives: validation of the setting, and lookup by address (IPv4 and IPv6)."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address

import psutil

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ConfigError


def choose_interface(config: Config, address: str) -> str | None:
    """Return cluster.network_interface, or if it is auto, the interface with this address; None if there is none.

    Call on the node in question. Raises ConfigError if it has no such interface.
    """
    check_interface(config)
    name = config.cluster.network_interface
    return name if name != AUTO else find_interface(address)


def check_interface(config: Config) -> None:
    """Raise ConfigError unless this node has every interface of cluster.network_interface, each with an address."""
    names, interfaces = config.cluster.network_interface, list_interfaces()
    for name in [] if names == AUTO else names.split(","):
        if name not in interfaces:
            known = ", ".join(sorted(interfaces)) or "none"
            remedy = f"{socket.gethostname()} has no interface {name!r} with an IP address; it has {known}"
            raise ConfigError("cluster.network_interface", names, config.origin("cluster.network_interface"), remedy)


def find_interface(address: str) -> str | None:
    """Return the name of this node's interface with this IPv4 or IPv6 address; None if there is none."""
    wanted = ip_address(address)
    return next((name for name, found in list_interfaces().items() if wanted in map(ip_address, found)), None)


def list_interfaces() -> Mapping[str, Sequence[str]]:
    """Return interface -> IPv4 and IPv6 addresses of this node; no interface without an address."""
    families = (socket.AF_INET, socket.AF_INET6)
    addresses = {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]  # %: the scope
        for name, entries in psutil.net_if_addrs().items()
    }
    return {name: found for name, found in addresses.items() if found}
