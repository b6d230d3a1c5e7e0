"""Names of nodes: host names, numbered where simulated nodes share a host."""

from __future__ import annotations

from raytrain_hpc.driver.node_names import NodeNames
from raytrain_hpc.planner.topology import Node, Topology


def make_names(*hosts: str) -> NodeNames:
    nodes = tuple(Node(f"id{number}", "10.0.0.1", 2, host=host) for number, host in enumerate(hosts))
    return NodeNames(Topology(nodes, "cpu"))


def test_a_node_has_the_name_of_its_host() -> None:
    names = make_names("gpu07", "gpu08")
    assert [names.get_name(f"id{number}", "") for number in range(2)] == ["gpu07", "gpu08"]


def test_nodes_that_share_a_host_are_numbered() -> None:
    names = make_names("laptop", "other", "laptop")
    assert [names.get_name(f"id{number}", "") for number in range(3)] == ["laptop#1", "other", "laptop#2"]


def test_a_node_that_joins_later_renames_no_other() -> None:
    names = make_names("laptop")
    assert names.get_name("later", "laptop") == "laptop#2"
    assert names.get_name("last", "new") == "new"
    assert [names.get_name(node_id, host) for node_id, host in (("id0", "laptop"), ("later", "laptop"))] == [
        "laptop",
        "laptop#2",
    ]
