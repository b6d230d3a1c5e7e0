"""Link attribution: find ranks that are cut off, from the links on which nothing is acknowledged. Pure functions.

A rank that is frozen, killed or in another collective is no such case: the kernel of its host answers for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MIN_TIMEOUTS = 2  # in a row: one packet can be lost


@dataclass(frozen=True)
class LinkFault:
    """Ranks that receive nothing from others.

    `ranks`: of one node if links between nodes are down. `links`: the links that are down, as pairs of ranks, the
    sender first. `is_certain`: all these links have nothing else in common.
    """

    ranks: tuple[int, ...]
    links: tuple[tuple[int, int], ...]
    is_certain: bool


def attribute_links(
    timeouts_by_rank: Mapping[int, Mapping[int, int]], nodes: Sequence[str], driver_node: str
) -> LinkFault | None:
    """Return the ranks whose network is down, or None if all links work.

    Call when ranks make no progress, although their processes run. `timeouts_by_rank`: for each rank, and each peer of
    it, how often in a row a packet to the peer was repeated because nothing was acknowledged. `nodes`: of each rank.

    The fault is where all links that are down meet: at a node, if some of them connect nodes, else at a rank. A single
    link, or links between two nodes only, do not tell which end is at fault: that without the driver is named, since
    the run can continue without it.
    """
    links = tuple(
        (rank, peer)
        for rank, timeouts in sorted(timeouts_by_rank.items())
        for peer, count in sorted(timeouts.items())
        if count >= MIN_TIMEOUTS
    )
    if not links:
        return None
    crosses_nodes = any(nodes[rank] != nodes[peer] for rank, peer in links)
    places = [nodes[rank] if crosses_nodes else f"{rank}" for rank in range(len(nodes))]
    common = set.intersection(*({places[rank], places[peer]} for rank, peer in links))
    if not common:
        return None
    home = driver_node if crosses_nodes else "0"
    place = max(common, key=lambda name: (name != home, name))
    ranks = tuple(rank for rank in range(len(nodes)) if places[rank] == place)
    return LinkFault(ranks, links, is_certain=len(common) == 1)
