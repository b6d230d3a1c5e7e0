"""Nodes as Ray reports them: device types, slots, and the presets of the planner."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.ray_topology import read_topology
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.topology import Topology


def make_node(number: int, gpus: int = 0, model: str = "", **fields: Any) -> dict[str, Any]:
    resources = (
        {"CPU": 64.0} | ({"GPU": float(gpus)} if gpus else {}) | ({f"accelerator_type:{model}": 1.0} if model else {})
    )
    address = {"NodeManagerAddress": f"10.0.0.{number}", "NodeManagerHostname": f"h{number}"}
    return {"NodeID": f"n{number}", "Alive": True, "Resources": resources, "Labels": {}} | address | fields


def read(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], *words: str) -> Topology:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    return read_topology(load_config(None, list(words)))


@pytest.mark.parametrize(
    ("model", "device", "preset", "has_bf16", "without_float8"),
    [
        ("H100", "cuda", "h100", True, ()),
        ("T4", "cuda", "", False, ("T4",)),
        ("AMD-Instinct-MI250X", "cuda", "mi250x", True, ("AMD-Instinct-MI250X",)),
        ("AMD-Instinct-MI300X-OAM", "cuda", "mi300x", True, ("AMD-Instinct-MI300X-OAM",)),
        ("Intel-GPU-Max-1550", "xpu", "pvc-tile", True, ("Intel-GPU-Max-1550",)),
        ("", "cuda", "", True, ()),  # started with --num-gpus, of a model that Ray does not know
    ],
)
def test_the_type_of_the_gpus_is_that_of_their_model(
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    device: str,
    preset: str,
    has_bf16: bool,
    without_float8: tuple[str, ...],
) -> None:
    topology = read(monkeypatch, [make_node(1, 8, model), make_node(2, 4, model), make_node(3)])
    assert [(node.id, node.slots) for node in topology.nodes] == [("n1", 8), ("n2", 4)]
    assert (topology.device, topology.accelerator, topology.ray_resource) == (device, preset, "GPU")
    assert (topology.has_bf16, topology.without_float8) == (has_bf16, without_float8)
    assert topology.has_accelerators and topology.device_name == preset


def test_gpus_that_ray_does_not_know_have_the_type_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = read(monkeypatch, [make_node(1, 12), make_node(2, 12)], "cluster.device=xpu")
    assert (topology.device, topology.total_slots) == ("xpu", 24)


def test_a_run_uses_gpus_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [make_node(1, 8, "H100"), make_node(2, 12, "Intel-GPU-Max-1550"), make_node(3, 2)]
    with pytest.raises(ClusterError, match="GPUs of 2 types; use cluster.device=cuda or cluster.device=xpu"):
        read(monkeypatch, nodes)
    for device, expected, preset in (("cuda", ["n1", "n3"], "h100"), ("xpu", ["n2", "n3"], "pvc-tile")):
        topology = read(monkeypatch, nodes, f"cluster.device={device}")
        assert ([node.id for node in topology.nodes], topology.accelerator) == (expected, preset)
    assert read(monkeypatch, nodes, "cluster.device=cpu").total_slots == 3 * 64


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_gpus_that_are_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    with pytest.raises(ClusterError, match=f"cluster.device={device}: no node of the cluster has a GPU"):
        read(monkeypatch, [make_node(1), make_node(2, 8, "H100", Alive=False)], f"cluster.device={device}")


def test_nodes_without_gpus_have_a_slot_per_cpu_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [make_node(1), make_node(2, 8, "H100", Alive=False)]
    topology = read(monkeypatch, nodes)
    assert (topology.device, topology.device_name, topology.ray_resource) == ("cpu", "cpu", "CPU")
    assert (topology.total_slots, topology.has_bf16, topology.without_float8) == (64, False, ())
    assert read(monkeypatch, nodes, "cluster.cpus_per_worker=10").total_slots == 6
    labels = [make_node(1, Labels={"rack": "r7"})]
    assert read(monkeypatch, labels, "cluster.rack_label=rack").nodes[0].rack == "r7"
