"""Choice of the axes that are left to the planner, for the number of workers that a cluster has room for by now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.auto_layout import list_free_settings, resolve_auto_layout
from raytrain_hpc.driver.backend import ExecutionBackend
from raytrain_hpc.driver.run_setup import PreparedRun
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.planner.topology import Node, Topology


class LayoutChooser:
    """Settings of the best layout for a number of workers, searched in a thread, since a search can take seconds.

    The split of the batch is that of the run. Each number is searched once, on the nodes as they are then.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        running: Config,
        batching: Batching,
        backend: ExecutionBackend,
        print_line: Callable[[str], None],
    ):
        """Initialize the chooser.

        `prepared`: the run with the settings that the user gave, before any was chosen. `running`: the settings that it
        started with on the workers of `backend`, of which the compute type is kept.
        """
        config = copy(prepared.config)
        config.train = replace(config.train, dtype=running.train.dtype)
        self._prepared = replace(prepared, config=config, stored_batching=batching)
        self._cluster, self._print_line = backend.cluster, print_line
        self.has_choice = bool(list_free_settings(self._prepared, backend.cluster))
        self._choices: dict[int, Config] = {}  # number of workers -> settings
        # Room for workers -> legal number of workers; 0: not found, or not yet. The run has its layout for the first.
        self._sizes: dict[int, int] = {backend.world_size: backend.world_size}
        self._lock = threading.Lock()  # one search at a time

    def get(self, world_size: int) -> Config | None:
        """Return the settings for a number of workers, or None if they are not known."""
        return self._choices.get(world_size)

    def find_size(self, limit: int, nodes: Sequence[NodeCapacity]) -> int:
        """Return the largest number of workers up to `limit` with a layout on these nodes; return at once.

        0: none is known. The first call for a limit starts the search.
        """
        if self.has_choice and limit not in self._sizes:
            self._sizes[limit] = 0
            topology = replace(
                self._cluster, nodes=tuple(Node(node.node_id, "", node.held + node.free) for node in nodes)
            )
            threading.Thread(target=self._search, args=(limit, topology), name="layout", daemon=True).start()
        return self._sizes.get(limit, 0)

    def _search(self, limit: int, topology: Topology) -> None:
        with self._lock:
            for world_size in range(limit, 0, -1):
                lines: list[str] = []
                try:
                    resolved = resolve_auto_layout(self._prepared, world_size, topology, lines.append)
                    resolved.resolve_layout(world_size)
                except ConfigError:  # no layout is legal for this number
                    continue
                for line in lines:
                    self._print_line(line)
                self._choices[world_size] = resolved.config
                self._sizes[limit] = world_size
                return
