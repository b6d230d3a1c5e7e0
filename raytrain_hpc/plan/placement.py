"""How many workers each node gets. Neighbouring ranks share a node: the driver numbers ranks in node order."""

from __future__ import annotations

from raytrain_hpc.errors import ClusterError
from raytrain_hpc.plan.topology import Topology


def node_shares(world: int, topology: Topology, together: int = 1) -> list[int]:
    """Workers on each node used, most first: one node-shaped bundle each.

    Fullest nodes first, so that the run touches as few nodes as possible; `together` neighbouring ranks (a
    tensor-parallel group) never straddle two nodes. Raises ClusterError where the cluster has too few slots.
    """
    if world > topology.slots:
        kind = "GPU" if topology.device == "cuda" else "CPU"
        raise ClusterError(
            f"cluster.workers={world}: the cluster has {topology.slots} free {kind} slots on {len(topology.nodes)} "
            f"nodes; use cluster.workers={topology.slots} or add nodes"
        )
    shares, left = [], world
    for node in sorted(topology.nodes, key=lambda n: (-n.slots, n.id)):
        share = min(left, node.slots // together * together)
        if share:
            shares.append(share)
            left -= share
    if left:
        slots = ", ".join(str(node.slots) for node in topology.nodes)
        raise ClusterError(
            f"parallel.tp={together}: {world // together} groups of {together} ranks do not fit, each within one node, "
            f"on nodes with {slots} slots; use a smaller parallel.tp or larger nodes"
        )
    return shares
