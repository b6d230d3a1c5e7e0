"""Nodes that Ray is draining because they are preempted or scaled down."""

from __future__ import annotations

import time

from raytrain_hpc.ray_private import get_draining_nodes

_QUERY_INTERVAL_S = 0.5


class NodeDrainMonitor:
    """Cached query for the nodes that Ray is draining."""

    def __init__(self) -> None:
        self._last_query_time = 0.0
        self._draining_nodes: frozenset[str] = frozenset()

    def get_draining_nodes(self) -> frozenset[str]:
        """Return the ids of the nodes that are being drained, as of at most half a second ago."""
        now = time.monotonic()
        if now - self._last_query_time > _QUERY_INTERVAL_S:
            self._last_query_time = now
            self._draining_nodes = get_draining_nodes()
        return self._draining_nodes
