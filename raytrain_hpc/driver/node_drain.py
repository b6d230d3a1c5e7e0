"""Nodes that are about to be removed: drained by Ray, or announced by their cloud."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf

from raytrain_hpc.ray_private import get_draining_nodes

_QUERY_INTERVAL_S = 0.5
_ANNOUNCED_TTL_S = 120.0  # a node that is lost within this time after it was last draining was preempted


class NodeDrainMonitor:
    """Cached query for the nodes that Ray is draining, together with those that a cloud has announced to reclaim."""

    def __init__(self) -> None:
        self._last_query_time = 0.0
        self._announced_nodes: frozenset[str] = frozenset()
        self._avoided_nodes: frozenset[str] = frozenset()
        self._draining_nodes: frozenset[str] = frozenset()
        self._last_seen: dict[str, float] = {}  # node id -> when it was last draining, in monotonic seconds

    def announce(self, nodes: Iterable[str]) -> None:
        """Treat these nodes like nodes that Ray drains, for the rest of the run."""
        self._announced_nodes |= frozenset(nodes)

    def avoid(self, nodes: Iterable[str]) -> None:
        """Let workers leave these nodes for the rest of the run, although nothing removes them.

        A driver on such a node can continue, unlike on one that is about to be removed.
        """
        self._avoided_nodes |= frozenset(nodes)

    def get_draining_nodes(self) -> frozenset[str]:
        """Return the ids of the nodes that workers are to leave, as of at most half a second ago."""
        self._refresh()
        return self._draining_nodes | self._announced_nodes | self._avoided_nodes

    def will_be_removed(self, node_id: str) -> bool:
        """Return whether a node, with all its processes, is about to be removed, as of at most half a second ago."""
        self._refresh()
        return node_id in self._draining_nodes | self._announced_nodes

    def was_announced(self, node_id: str) -> bool:
        """Return whether the removal of a node, which may be gone by now, was announced before."""
        self._query()
        since_draining_s = time.monotonic() - self._last_seen.get(node_id, -inf)
        return node_id in self._announced_nodes or since_draining_s < _ANNOUNCED_TTL_S

    def _refresh(self) -> None:
        if time.monotonic() - self._last_query_time > _QUERY_INTERVAL_S:
            self._query()

    def _query(self) -> None:
        self._last_query_time = time.monotonic()
        self._draining_nodes = get_draining_nodes()
        self._last_seen |= dict.fromkeys(self._draining_nodes, self._last_query_time)
