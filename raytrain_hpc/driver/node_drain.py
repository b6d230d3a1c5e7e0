"""Nodes that Ray is about to take away: preempted, or scaled down."""

from __future__ import annotations

import time

import ray._private.state  # no public call tells

_EVERY_S = 0.5


class Drains:
    """Asks Ray now and then."""

    def __init__(self) -> None:
        self._asked = 0.0
        self._found: frozenset[str] = frozenset()

    def nodes(self) -> frozenset[str]:
        """Ids of the nodes that are being drained, as Ray said at most half a second ago."""
        now = time.monotonic()
        if now - self._asked > _EVERY_S:
            self._asked = now
            self._found = frozenset(ray._private.state.state.get_draining_nodes())
        return self._found
