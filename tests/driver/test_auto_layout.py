"""Settings left to the planner are chosen once, for the cluster of the run."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.driver import host_machine
from raytrain_hpc.driver.auto_layout import (
    build_machine,
    estimate_run,
    refit_activation_memory,
    resolve_auto_layout,
    resolve_for_backend,
)
from raytrain_hpc.driver.run_banner import announce_run
from raytrain_hpc.driver.run_setup import PreparedRun, prepare_run
from raytrain_hpc.errors import ConfigError, LayoutError
from raytrain_hpc.planner.hardware import DEVICES
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.topology import Node, Topology
from tests.warm_pool import make_small_config

WIDE = ["model.hidden_size=4096", "model.num_layers=32", "model.num_heads=32", "train.seq_len=2048"]
LARGE = [*WIDE, "train.global_batch_size=64", "train.dtype=bf16"]


def cluster(*slots: int, device: str = "cuda", accelerator: str = "h100") -> Topology:
    return Topology(
        tuple(Node(f"n{i}", f"10.0.0.{i}", count) for i, count in enumerate(slots)),
        device,
        accelerator,
        device == "cuda",
    )


def prepare(*words: str) -> PreparedRun:
    return prepare_run(make_small_config(None, *words), None, lambda line: None)


def test_unset_axes_are_chosen_on_accelerators() -> None:
    lines: list[str] = []
    run = prepare(*LARGE, "cluster.workers=16")
    chosen = resolve_auto_layout(run, 16, cluster(8, 8), lines.append)
    layout, batching = chosen.resolve_layout(16)
    assert layout.world_size == 16 and layout.tp <= 8
    assert layout.zero > 0 or layout.tp * layout.pp > 1, "6.6 B parameters are too many for a device"
    assert batching.size * batching.count == 64
    assert "planned" in lines[0] and "fits" in lines[0] and "expected" in lines[1]
    assert run.config.parallel.tp == 1, "the given settings are not modified"


def test_nothing_is_chosen_on_cpu_unless_requested() -> None:
    run = prepare("cluster.workers=4")
    assert resolve_auto_layout(run, 4, cluster(4, device="cpu"), pytest.fail).config.parallel == run.config.parallel
    requested = prepare("cluster.workers=4", "parallel.tp=[2]", "parallel.zero=[1]")
    layout, _ = resolve_auto_layout(requested, 4, cluster(2, 2, device="cpu"), lambda line: None).resolve_layout(4)
    assert (layout.tp, layout.zero, layout.dp_shard) == (2, 1, 2)


def test_activations_are_kept_on_devices_of_unknown_memory() -> None:
    """On CPUs `auto` recomputes nothing, whatever the planner assumes of their memory."""
    words = ["activation_checkpointing=auto", "recompute_layers=auto", "activation_offload=auto", "tp=[2]"]
    run = prepare(*LARGE, "cluster.workers=4", *(f"parallel.{word}" for word in words))
    p = resolve_auto_layout(run, 4, cluster(4, device="cpu"), lambda line: None).config.parallel
    assert (p.tp, p.activation_checkpointing, p.recompute_layers, p.activation_offload) == (2, "none", 0, "none")


@pytest.mark.parametrize("mode", ["false", "elastic"])
def test_a_smaller_generation_recomputes_what_its_layout_needs(mode: str) -> None:
    """ZeRO-3 over fewer ranks leaves less memory for activations. Compiled blocks of an elastic run keep their bits."""
    words = [*LARGE, "cluster.workers=16", "parallel.zero=3", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1"]
    given = prepare(*words, "train.micro_batch_size=4", f"train.deterministic={mode}")
    lines: list[str] = []
    started = resolve_auto_layout(given, 16, cluster(8, 8), lines.append).config
    _, batching = replace(given, config=started).resolve_layout(16)
    refit = partial(refit_activation_memory, given, batching, cluster(8, 8), lines.append)
    layout, _ = replace(given, config=started).resolve_layout(16)
    assert refit(started, layout).parallel == started.parallel
    del lines[:]
    smaller = refit(started, Layout(dp_shard=2, zero=3)).parallel
    if mode == "elastic":
        assert smaller == started.parallel and not lines
        return
    assert started.parallel.activation_checkpointing == "none" != smaller.activation_checkpointing
    assert "planned for 2 x dp_shard=2" in lines[0]
    fixed = replace(given, config=replace(given.config, origins={"parallel.activation_checkpointing": "command line"}))
    assert (
        refit_activation_memory(fixed, batching, cluster(8), pytest.fail, started, Layout(dp_shard=2, zero=3))
        is started
    )


def test_uneven_nodes_count_as_smaller_equal_nodes() -> None:
    chosen = resolve_auto_layout(prepare(*LARGE, "cluster.workers=12"), 12, cluster(8, 4), lambda line: None)
    layout, _ = chosen.resolve_layout(12)
    assert 4 % layout.tp == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_that_follows_its_cluster_has_at_most_a_worker_per_microbatch(device: str) -> None:
    """A run that was started on two devices resumes on eight: the split of its batch is fixed."""
    run = prepare("train.global_batch_size=12", "cluster.workers=auto", "train.deterministic=elastic")
    run = replace(run, stored_batching=Batching(2, 6))
    lines: list[str] = []
    backend: Any = SimpleNamespace(world_size=8, follows_cluster=True, cluster=cluster(8, device=device))
    resolved = resolve_for_backend(run, backend, lines.append)
    assert (backend.world_size, resolved.resolve_layout(2)[0].world_size) == (2, 2)
    assert "cluster: room for 8 workers; 2 microbatches allow 2" in lines
    backend = SimpleNamespace(world_size=8, follows_cluster=False, cluster=cluster(8, device=device))
    with pytest.raises(LayoutError, match="too few for 8 data-parallel ranks"):
        resolve_for_backend(run, backend, lines.append)


def test_stored_batching_is_kept() -> None:
    run = prepare(*LARGE, "cluster.workers=8")
    stored = PreparedRun(**{**vars(run), "stored_batching": run.resolve_layout(8)[1]})
    assert (
        resolve_auto_layout(stored, 8, cluster(8), lambda line: None).config.train.micro_batch_size
        == stored.stored_batching.size
    )  # type: ignore[union-attr]


def announce(topology: Topology, *words: str) -> list[str]:
    """Return the summary of a run on `topology`, planned as far as its settings allow it."""
    lines: list[str] = []
    world = topology.total_slots
    run = prepare(*LARGE, *words, f"cluster.workers={world}")
    run = resolve_auto_layout(run, world, topology, lines.append)
    layout, batching = run.resolve_layout(world)
    machine = build_machine(world, topology)
    announce_run(run, layout, batching, machine, estimate_run(run, layout, batching, machine), lines.append)
    return lines


FIXED = ["parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.offload=none"]
LARGE_BATCH = ["train.micro_batch_size=8", "parallel.activation_checkpointing=none", "parallel.activation_offload=none"]


@pytest.mark.parametrize(
    "words",
    [
        ["model.num_layers=190", "parallel.offload=none"],
        [*FIXED, *LARGE_BATCH, "parallel.zero=3", "parallel.dp_shard=8"],
    ],
    ids=["planned", "fixed"],
)
def test_model_that_may_not_fit_is_a_warning_with_a_remedy(words: list[str]) -> None:
    (warning,) = [line for line in announce(cluster(8), *words) if line.startswith("memory  warning: ")]
    needed, available = map(float, re.findall(r"([\d.]+) GiB", warning)[:2])
    assert needed > available == 79.1 and "it may run out; remedy: " in warning
    assert not [line for line in announce(cluster(8)) if line.startswith("memory ")]


def test_model_whose_state_alone_does_not_fit_is_refused() -> None:
    words = [*FIXED, "parallel.zero=0", "model.num_layers=48"]
    refusal = r"^cluster.workers=8 .* take 1\d\d\.\d GiB per worker, which has 79.1 GiB \(h100\); .*parallel.zero=3"
    with pytest.raises(LayoutError, match=refusal):
        announce(cluster(8), *words)
    announce(cluster(8, accelerator=""), *words)  # of unknown memory
    announce(cluster(4, 4, device="cpu"), *words)


def test_cpu_workers_share_the_cpus_and_the_memory_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_machine, "count_usable_cpus", lambda: 2)
    monkeypatch.setattr(host_machine, "read_memory_bytes", lambda: 32 << 30)
    one_core = DEVICES["cpu"]
    for workers, share in ((1, 1.0), (2, 1.0), (8, 0.25)):
        device = build_machine(workers, cluster(9, device="cpu")).device
        assert (device.tflops, device.memory_gbs) == (share * one_core.tflops, share * one_core.memory_gbs)
        assert device.memory_gib == 32 / workers
    assert build_machine(8, cluster(4, 4, device="cpu")).device == one_core, "of other hosts"


def test_unknown_device_is_assumed_to_be_an_h100() -> None:
    lines: list[str] = []
    resolve_auto_layout(prepare(*LARGE, "cluster.workers=8"), 8, cluster(8, accelerator=""), lines.append)
    assert "per device assumed to be an h100" in lines[0]


@pytest.mark.parametrize(
    ("words", "device", "has_bf16", "expected"),
    [
        ([], "cpu", False, ("fp32", False)),
        ([], "cuda", True, ("bf16", True)),
        ([], "cuda", False, ("fp32", True)),
        (["parallel.tp=2"], "cuda", True, ("bf16", True)),
        (["train.dtype=fp32", "train.compile=false"], "cuda", True, ("fp32", False)),
        (["model.num_experts=4"], "cuda", True, ("bf16", True)),
    ],
)
def test_precision_and_compilation_follow_the_hardware(
    words: list[str], device: str, has_bf16: bool, expected: tuple[str, bool]
) -> None:
    axes = [f"parallel.{axis}=1" for axis in ("tp", "cp", "pp") if f"parallel.{axis}=2" not in words]
    run = prepare("cluster.workers=4", "train.dtype=auto", "parallel.zero=0", *axes, *words)
    topology = Topology((Node("n0", "10.0.0.1", 4),), device, "h100" if device == "cuda" else "", has_bf16)
    train = resolve_auto_layout(run, 4, topology, lambda line: None).config.train
    assert (train.dtype, train.compile) == expected
    assert run.config.train.compile in ("auto", False), "the given settings are not modified"


@pytest.mark.parametrize(
    ("kind", "device", "remedy"),
    [
        ("gpu_hang", "cpu", "needs a GPU, and the workers of this run have none"),
        ("network_down", "cuda", "needs workers on CPUs"),
    ],
)
def test_faults_that_the_workers_cannot_have_are_refused(kind: str, device: str, remedy: str) -> None:
    run = prepare_run(make_small_config(None, f"fault.inject=[{{kind: {kind}}}]"), None, print)
    with pytest.raises(ConfigError, match=f"fault.inject='{kind}' .*{remedy}"):
        resolve_auto_layout(run, 1, cluster(1, device=device), print)
    other = {"cpu": "cuda", "cuda": "cpu"}[device]
    resolve_auto_layout(run, 1, cluster(1, device=other), print)
