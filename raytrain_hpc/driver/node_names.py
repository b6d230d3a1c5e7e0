"""Names of Ray nodes for messages and records: host names, not Ray's identifiers of 56 digits."""

from __future__ import annotations

from collections import Counter

from raytrain_hpc.planner.topology import Topology


class NodeNames:
    """Names of the nodes of a run. They do not change during the run.

    A node has the name of its host. Nodes that share a host are numbered: `host#1`, `host#2`.
    """

    def __init__(self, topology: Topology):
        hosts = Counter(node.host for node in topology.nodes)
        self._name_of_id: dict[str, str] = {}
        self._num_on_host: Counter[str] = Counter()
        for node in topology.nodes:
            if node.host:
                self._num_on_host[node.host] += 1
                number = f"#{self._num_on_host[node.host]}" if hosts[node.host] > 1 else ""
                self._name_of_id[node.id] = node.host + number

    def get_name(self, node_id: str, host: str) -> str:
        """Return the name of a node. One that joined during the run is numbered if its host has a node already."""
        if node_id not in self._name_of_id:
            self._num_on_host[host] += 1
            number = self._num_on_host[host]
            self._name_of_id[node_id] = host if number == 1 else f"{host}#{number}"
        return self._name_of_id[node_id]
