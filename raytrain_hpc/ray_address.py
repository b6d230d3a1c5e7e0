"""Address of the Ray cluster, checked before Ray is imported: an unreachable address is refused within seconds."""

from __future__ import annotations

import os
import socket

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ClusterError

LOCAL = "local"
_PROBE_TIMEOUT_S = 2.0


def get_cluster_address(config: Config) -> str:
    """Return cluster.address if set, else RAY_ADDRESS, else "auto". "local" means to start a cluster."""
    if config.cluster.address != AUTO:
        return config.cluster.address
    return os.environ.get("RAY_ADDRESS") or AUTO


def check_address(config: Config) -> None:
    """Raise ClusterError if an explicit cluster address is unreachable. Ray itself would retry for much longer."""
    address = get_cluster_address(config)
    if address in (AUTO, LOCAL) or is_reachable(address.removeprefix("ray://")):
        return
    origin = config.origin("cluster.address") if config.cluster.address != AUTO else "RAY_ADDRESS"
    where = f" ({origin})" if origin else ""
    raise ClusterError(
        f"cluster.address={address}{where}: nothing answers there; start Ray with `ray start --head`, correct "
        "the address, or use cluster.address=local"
    )


def is_reachable(address: str) -> bool:
    """Check whether a TCP connection to host:port succeeds."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return False
    try:
        with socket.create_connection((host, int(port)), timeout=_PROBE_TIMEOUT_S):
            return True
    except OSError:
        return False
