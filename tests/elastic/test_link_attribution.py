"""Which ranks are cut off from the network, by the links on which nothing is acknowledged."""

from __future__ import annotations

from itertools import permutations

import pytest

from raytrain_hpc.elastic.link_attribution import LinkFault, attribute_links

ONE_NODE = ["a"] * 4
TWO_NODES = ["a", "a", "b", "b"]
THREE_NODES = ["a", "a", "b", "b", "c", "c"]


def make_timeouts(num_ranks: int, *links: tuple[int, int], count: int = 3) -> dict[int, dict[int, int]]:
    """Every rank has sent something to every other one; nothing is acknowledged on `links`."""
    timeouts = {rank: {peer: 0 for peer in range(num_ranks) if peer != rank} for rank in range(num_ranks)}
    for rank, peer in links:
        timeouts[rank][peer] = count
    return timeouts


def test_links_that_work_are_no_fault() -> None:
    assert attribute_links(make_timeouts(4), ONE_NODE, "a") is None
    assert attribute_links({}, ONE_NODE, "a") is None
    assert attribute_links(make_timeouts(4, (0, 1), count=1), ONE_NODE, "a") is None, "a packet that was repeated"


@pytest.mark.parametrize("rank", range(4))
def test_the_rank_at_which_all_links_that_are_down_meet(rank: int) -> None:
    before, after = (rank - 1) % 4, (rank + 1) % 4
    links = ((before, rank), (rank, after))  # in a ring
    fault = attribute_links(make_timeouts(4, *links), ONE_NODE, "a")
    assert fault == LinkFault((rank,), tuple(sorted(links)), is_certain=True)


@pytest.mark.parametrize("node", ["a", "b", "c"])
def test_the_node_at_which_all_links_that_are_down_meet(node: str) -> None:
    ranks = tuple(rank for rank, name in enumerate(THREE_NODES) if name == node)
    links = [pair for pair in permutations(range(6), 2) if (pair[0] in ranks) != (pair[1] in ranks)]
    fault = attribute_links(make_timeouts(6, *links), THREE_NODES, "a")
    assert fault is not None and (fault.ranks, fault.is_certain) == (ranks, True)
    one_rank = [link for link in links if ranks[0] in link]  # the other one has sent nothing to other nodes
    fault = attribute_links(make_timeouts(6, *one_rank), THREE_NODES, "a")
    assert fault is not None and fault.ranks == ranks


@pytest.mark.parametrize(("driver", "expected"), [("a", (2, 3)), ("b", (0, 1))])
def test_between_two_nodes_the_one_without_the_driver_is_named(driver: str, expected: tuple[int, ...]) -> None:
    fault = attribute_links(make_timeouts(4, (1, 2), (2, 1), (0, 3)), TWO_NODES, driver)
    assert fault is not None and (fault.ranks, fault.is_certain) == (expected, False)


def test_between_two_ranks_the_first_one_stays() -> None:
    fault = attribute_links(make_timeouts(2, (0, 1), (1, 0)), ["a", "a"], "a")
    assert fault is not None and (fault.ranks, fault.is_certain) == ((1,), False)


def test_links_without_a_common_end_name_no_rank() -> None:
    """As when a switch is down."""
    assert attribute_links(make_timeouts(4, (0, 1), (2, 3)), ONE_NODE, "a") is None
    assert attribute_links(make_timeouts(6, (0, 2), (2, 4), (4, 0)), THREE_NODES, "a") is None


def test_ranks_that_do_not_reply_are_seen_by_the_others() -> None:
    timeouts = make_timeouts(4, (0, 1), (2, 1))
    del timeouts[1], timeouts[3]
    fault = attribute_links(timeouts, ONE_NODE, "a")
    assert fault is not None and (fault.ranks, fault.is_certain) == ((1,), True)
