"""Layout search: legality, order, the search space, and the errors for impossible requests."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from raytrain_hpc import plan
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.errors import ConfigError, LayoutError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import DEVICES, LINKS, make_machine
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout
from raytrain_hpc.planner.search import rank_layouts
from raytrain_hpc.planner.search_space import apply_choice, build_search_space

LLAMA = ["model.preset=llama3_8b", "train.seq_len=8192", "train.global_batch_size=256", "train.dtype=bf16"]
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")


def plan_layouts(*overrides: str, **options: Any) -> list[dict[str, Any]]:
    layouts: list[dict[str, Any]] = plan(load_config(None, list(overrides)), **options)["layouts"]
    return layouts


def test_layouts_that_fit_come_first_sorted_by_step_time() -> None:
    rows = plan_layouts(*LLAMA, nodes=2, gpus_per_node=8, device="h100")
    fits = [row["fits"] for row in rows]
    assert fits == sorted(fits, reverse=True) and fits[0]
    seconds = [row["step_time_s"] for row in rows if row["fits"]]
    assert seconds == sorted(seconds)
    for row in rows:
        assert row["fits"] == (row["memory_gib"] <= DEVICES["h100"].memory_gib)
        assert row["micro_batch_size"] * row["grad_acc"] * row["dp_replicate"] * row["dp_shard"] >= 256


def test_every_layout_can_be_trained() -> None:
    """The checks of a run accept each layout. Every fortieth is also parsed from overrides, as a user writes them."""
    config = load_config(None, LLAMA)
    for index, row in enumerate(
        plan_layouts(*LLAMA, "parallel.pp_schedule=auto", nodes=2, gpus_per_node=4, device="h100")
    ):
        assert row["dp_replicate"] * row["dp_shard"] * row["tp"] * row["cp"] * row["pp"] == 8
        chosen = {key: row[key] for key in (*AXES, "ep", "zero", "pp_schedule", "activation_checkpointing")}
        config.parallel = replace(config.parallel, **chosen)
        config.train = replace(config.train, micro_batch_size=row["micro_batch_size"])
        if index % 40 == 0:
            overrides = [f"parallel.{key}={value}" for key, value in chosen.items()]
            parsed = load_config(None, [*LLAMA, *overrides, f"train.micro_batch_size={row['micro_batch_size']}"])
            assert (parsed.parallel, parsed.train) == (config.parallel, config.train)
        batching = resolve_batching(config, resolve_layout(config, 8))
        assert batching.size == row["micro_batch_size"]


def test_no_legal_layout_is_left_out() -> None:
    """Against all combinations of small numbers."""
    overrides = ["model.num_layers=4", "model.num_heads=4", "train.global_batch_size=6", "train.seq_len=4096"]
    planned = {
        (row["tp"], row["pp"], row["cp"], row["zero"], row["dp_shard"], row["micro_batch_size"])
        for row in plan_layouts(*overrides, "train.dtype=bf16", nodes=1, gpus_per_node=4, device="h100")
        if row["zero"] in (0, 1)
    }
    expected = set()
    for tp, pp, cp, zero, micro_batch_size in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (0, 1), (1, 2, 3, 6)):
        parallel = [f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.cp={cp}", f"parallel.zero={zero}"]
        try:
            config = load_config(None, [*overrides, *parallel, f"train.micro_batch_size={micro_batch_size}"])
            layout = resolve_layout(config, 4)
            resolve_batching(config, layout)
        except LayoutError:
            continue
        zero = zero if layout.dp_shard > 1 else 0  # the same over one rank, and listed once
        expected.add((tp, pp, cp, zero, layout.dp_shard, micro_batch_size))
    assert planned == expected


def test_set_values_are_kept_and_lists_are_chosen_from() -> None:
    rows = plan_layouts(
        *LLAMA, "parallel.tp=[2,4]", "parallel.pp=2", "parallel.zero=1", nodes=1, gpus_per_node=8, device="h100"
    )
    assert {row["tp"] for row in rows} == {2, 4}
    assert {
        (row["pp"], row["zero"], row["activation_checkpointing"] in ("none", "selective", "full")) for row in rows
    } == {(2, 1, True)}


def test_values_assigned_in_python_are_kept() -> None:
    config = load_config(None, [*LLAMA, "parallel.pp=[4,1]", "parallel.zero=auto"])
    config.parallel.tp, config.parallel.activation_checkpointing = 4, "full"
    config.parallel.pp, config.parallel.zero, config.parallel.recompute_layers = 2, 1, 3  # instead of the choices
    words = ["tp=4", "activation_checkpointing=full", "pp=2", "zero=1", "recompute_layers=3"]
    given = load_config(None, [*LLAMA, *(f"parallel.{word}" for word in words)])
    assert build_search_space(config, has_accelerator=True) == build_search_space(given, has_accelerator=True)
    rows = plan(config, nodes=1, gpus_per_node=8, device="h100")["layouts"]
    assert rows == plan(given, nodes=1, gpus_per_node=8, device="h100")["layouts"]
    assert {(row["tp"], row["pp"]) for row in rows} == {(4, 2)}


def test_replicas_are_chosen_from_a_list() -> None:
    overrides = [*LLAMA, "parallel.dp_replicate=[2,4]", "parallel.zero=[0,3]"]
    rows = plan_layouts(*overrides, nodes=1, gpus_per_node=8, device="h100")
    assert {row["dp_replicate"] for row in rows} == {2, 4} and {row["zero"] for row in rows} == {0, 3}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["zero=3", "dp_shard=[2,8]"], {(4, 2), (1, 8)}),
        (["zero=3", "dp_replicate=[2,1]"], {(2, 4), (1, 8)}),
        (["zero=3", "dp_replicate=[1,2]", "dp_shard=4"], {(2, 4)}),
        (["zero=3", "dp_shard=[4,8]", "dp_replicate=2"], {(2, 4)}),
        (["zero=3", "dp_shard=[2,4,8]", "dp_replicate=[1,4]"], {(4, 2), (1, 8)}),
        (["zero=[3,0]", "dp_shard=[8,1]"], {(1, 8), (8, 1)}),
        (["zero=[0,3]", "dp_shard=[2,8]"], {(4, 2), (1, 8)}),
        (["zero=[0,3]", "dp_replicate=[8,1]"], {(8, 1), (1, 8)}),
    ],
)
def test_the_layout_that_is_chosen_from_lists_of_data_axes_is_the_one_that_runs(
    words: list[str], expected: set[tuple[int, int]]
) -> None:
    axes = ["tp=1", "pp=1", "cp=1", *words]
    config = load_config(None, [*LLAMA, *(f"parallel.{word}" for word in axes)])
    spec, machine = resolve_model_spec(config.model, vocab_size=None, seq_len=8192), make_machine("h100", 1, 8)
    estimates = rank_layouts(config, spec, machine, Calibration(), build_search_space(config, has_accelerator=True))
    layouts = [estimate.choice.layout for estimate in estimates]
    assert {(layout.dp_replicate, layout.dp_shard) for layout in layouts} == expected
    assert [resolve_layout(apply_choice(config, estimate.choice), 8) for estimate in estimates] == layouts


@pytest.mark.parametrize("sizes", ["[1,3]", "[3,1,auto]"])
def test_sizes_of_microbatches_that_do_not_divide_the_batch_are_skipped(sizes: str) -> None:
    words = ["model.preset=llama3_1b", "train.global_batch_size=64", "train.seq_len=512", "parallel.pp=1"]
    rows = plan_layouts(*words, f"train.micro_batch_size={sizes}", nodes=1, gpus_per_node=3, device="h100")
    assert rows and all(64 % row["micro_batch_size"] == 0 for row in rows)
    with pytest.raises(ConfigError, match="train.micro_batch_size=3.*must divide train.global_batch_size=64"):
        load_config(None, [*words, "train.micro_batch_size=[3,5]"])


def test_on_cpus_only_auto_settings_are_chosen() -> None:
    config = load_config(None, [])
    assert build_search_space(config, has_accelerator=False) == {}
    assert "tp" in build_search_space(config, has_accelerator=True)
    requested = load_config(None, ["parallel.tp=auto"])
    assert build_search_space(requested, has_accelerator=False) == {"tp": None}
    elastic = load_config(None, ["train.deterministic=elastic"])
    assert not {"tp", "pp", "cp", "ep"} & build_search_space(elastic, has_accelerator=True).keys()


def test_an_applied_choice_leaves_nothing_to_choose() -> None:
    config = load_config(None, [*LLAMA, "parallel.tp=[2]", "parallel.zero=[3]", "train.micro_batch_size=[1]"])
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=8192)
    best = rank_layouts(
        config, spec, make_machine("h100", 1, 8), Calibration(), build_search_space(config, has_accelerator=True)
    )[0]
    chosen = apply_choice(config, best.choice)
    assert resolve_layout(chosen, 8) == best.choice.layout
    assert resolve_batching(chosen, best.choice.layout) == best.choice.batching
    assert (
        chosen.parallel.activation_checkpointing == best.choice.recompute
        and build_search_space(chosen, has_accelerator=False) == {}
    )
    assert (config.parallel.zero, config.auto_choices["parallel.tp"]) == (3, [2]), "the config itself is unchanged"


@pytest.mark.parametrize(
    ("overrides", "options", "named"),
    [
        (["parallel.tp=3"], {"nodes": 1, "gpus_per_node": 8}, "parallel.tp"),
        (
            ["train.global_batch_size=4", "parallel.tp=1", "parallel.cp=1", "parallel.pp=1"],
            {"nodes": 8},
            "global_batch_size",
        ),
        ([], {"nodes": 2, "workers": 5}, "workers"),
        ([], {"device": "h1000"}, "known: a100"),
        ([], {"device": "h100", "across": "string"}, "known: nvlink3"),
    ],
)
def test_impossible_requests_name_the_setting_to_change(
    overrides: list[str], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        plan(load_config(None, overrides), **options)


@pytest.mark.parametrize(
    "word",
    ["parallel.tp=[0,1]", "parallel.tp=[]", "parallel.tp=[a]", "parallel.pp_schedule=[zbv,x]", "parallel.zero=[4]"],
)
def test_list_entries_are_validated_like_single_values(word: str) -> None:
    with pytest.raises(ConfigError, match=word.split("=")[0]):
        load_config(None, [word])


def test_a_model_that_does_not_fit_comes_with_remedies() -> None:
    result = plan(load_config(None, ["model.preset=llama3_70b", "train.dtype=bf16"]), nodes=1, gpus_per_node=2)
    assert not result["fits"] and "does not fit" in result["verdict"]
    assert 1 <= len(result["remedies"]) <= 3
    assert all("too much" in row["why"] for row in result["layouts"])


class TestStrategies:
    """Rules of thumb for choosing a layout come out as special cases."""

    def test_one_device_that_holds_the_model_saves_no_memory(self) -> None:
        best = plan_layouts(
            "model.preset=gpt2_124m", "train.dtype=bf16", "train.seq_len=1024", nodes=1, gpus_per_node=1
        )[0]
        assert (best["zero"], best["activation_checkpointing"], best["offload"]) == (0, "none", "none")

    def test_one_device_that_does_not_hold_the_model_offloads(self) -> None:
        overrides = [*LLAMA, "model.num_layers=24", "model.vocab_size=32000", "train.seq_len=2048"]  # 5.5 B parameters
        best = plan_layouts(*overrides, "parallel.offload=auto", nodes=1, gpus_per_node=1, device="h100")[0]
        assert best["offload"] == "cpu" and best["fits"]
        assert not any(row["fits"] for row in plan_layouts(*overrides, nodes=1, gpus_per_node=1, device="h100"))

    def test_tensor_parallel_ranks_stay_inside_a_node(self) -> None:
        for per_node in (2, 4, 8):
            words = ["model.preset=llama3_70b", *LLAMA[1:], "parallel.zero=3", "train.micro_batch_size=1"]
            rows = plan_layouts(*words, nodes=32 // per_node, gpus_per_node=per_node)
            assert max(row["tp"] for row in rows) <= per_node

    def test_slow_links_favor_model_parallelism(self) -> None:
        words = [*LLAMA, "train.micro_batch_size=[1,2]"]
        fast = plan_layouts(*words, nodes=16, gpus_per_node=8, device="h100")[0]
        slow = plan_layouts(*words, nodes=16, gpus_per_node=8, device="h100", across="ethernet")[0]
        assert slow["step_time_s"] > fast["step_time_s"]
        assert slow["pp"] * slow["tp"] > fast["pp"] * fast["tp"]

    def test_a_small_model_needs_no_model_parallelism(self) -> None:
        overrides = ["model.preset=gpt2_124m", "train.dtype=bf16", "train.seq_len=1024", "train.global_batch_size=512"]
        best = plan_layouts(*overrides, nodes=1, gpus_per_node=8, device="h100")[0]
        assert best["tp"] == best["pp"] == best["cp"] == 1


def test_collectives_reach_the_measured_bandwidth() -> None:
    cluster = make_machine("h100", 8, 8)
    inside = cluster.estimate_collective_s("all_reduce", 2 * 7 / 8 * 256e6, 8, 8)
    assert inside == pytest.approx(2 * 7 / 8 * 256e6 / 436e9, rel=0.2), "as measured, except for the latency"
    across = cluster.estimate_collective_s("all_reduce", 2 * 63 / 64 * 1e9, 64, 8)
    assert across == pytest.approx(2 * 63 / 64 * 1e9 / 100e9, rel=0.2)
    one_rank_per_node_s = cluster.estimate_collective_s("all_reduce", 1e9, 8, 1)
    assert one_rank_per_node_s >= 1e9 / 50e9, "one rank per node has one adapter"
    assert cluster.estimate_collective_s("gather", 1e9, 1, 1) == 0.0
    assert {device.inside for device in DEVICES.values()} | {device.across for device in DEVICES.values()} <= set(LINKS)
