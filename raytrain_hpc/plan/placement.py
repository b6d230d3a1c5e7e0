"""How many workers each node gets. Neighbouring ranks share a node: the driver numbers ranks in node order."""

from __future__ import annotations

from raytrain_hpc.errors import ClusterError
from raytrain_hpc.plan.topology import Topology


def node_shares(world: int, topology: Topology) -> list[int]:
    """Workers on each node used, most first: one node-shaped bundle each.

    Fullest nodes first, so that the run touches as few nodes as possible. Raises ClusterError where the cluster
    has too few slots.
    """
    if world > topology.slots:
        kind = "GPU" if topology.device == "cuda" else "CPU"
        raise ClusterError(
            f"cluster.workers={world}: the cluster has {topology.slots} free {kind} slots on {len(topology.nodes)} "
            f"nodes; use cluster.workers={topology.slots} or add nodes"
        )
    shares = []
    for node in sorted(topology.nodes, key=lambda n: (-n.slots, n.id)):
        if world == 0:
            break
        shares.append(min(world, node.slots))
        world -= shares[-1]
    return shares
