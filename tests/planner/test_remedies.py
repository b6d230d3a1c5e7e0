"""Verdict and remedies of a plan: every remedy, typed as it is printed, gives a plan that fits."""

from __future__ import annotations

import re
from typing import Any

import pytest

from raytrain_hpc import plan
from raytrain_hpc.config.loader import load_config

LLAMA_8B = ["model.preset=llama3_8b", "train.dtype=bf16", "train.seq_len=8192", "train.global_batch_size=64"]
LLAMA_70B = ["model.preset=llama3_70b", "train.dtype=bf16", "train.seq_len=8192", "train.global_batch_size=512"]
LLAMA_70B += ["train.micro_batch_size=[1,2]"]
TOO_LARGE: dict[str, tuple[list[str], dict[str, Any]]] = {
    "settings that need memory": (
        [*LLAMA_8B, "parallel.zero=0", "parallel.activation_checkpointing=none"],
        {"gpus_per_node": 2},
    ),
    "too few devices": (LLAMA_70B, {"gpus_per_node": 8}),
    "a fixed layout": ([*LLAMA_70B, "parallel.dp_shard=8", "parallel.tp=1", "parallel.pp=1"], {"gpus_per_node": 8}),
    "a small device": ([*LLAMA_8B, "parallel.tp=1"], {"gpus_per_node": 4, "device": "h100,memory_gib=20"}),
    "CPUs": (["model.preset=gpt2_1.5b", "train.dtype=fp32", "train.seq_len=1024"], {"workers": 4, "device": "cpu"}),
    "one device": ([*LLAMA_8B, "train.global_batch_size=1"], {"gpus_per_node": 1}),
}


def apply_remedy(remedy: str, options: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the overrides and the options of `plan` that a remedy asks for."""
    overrides = re.findall(r"\b[a-z]+\.[a-z_]+=[a-z0-9]+", remedy)
    options = dict(options)
    if machine := re.search(r"(\d+) workers \((\d+) nodes of (\d+)\)", remedy):
        options = {"device": options.get("device"), "nodes": int(machine[2]), "gpus_per_node": int(machine[3])}
        assert int(machine[1]) == options["nodes"] * options["gpus_per_node"]
    if device := re.search(r"--device (\w+)", remedy):
        options["device"] = device[1]
    assert overrides or machine or device, remedy
    return overrides, options


@pytest.mark.parametrize("case", TOO_LARGE)
def test_every_remedy_helps(case: str) -> None:
    words, options = TOO_LARGE[case]
    result = plan(load_config(None, words), **options)
    assert not result["fits"] and 1 <= len(result["remedies"]) <= 3
    for remedy in result["remedies"]:
        overrides, changed_options = apply_remedy(remedy, options)
        changed = plan(load_config(None, [*words, *overrides]), **changed_options)
        assert changed["fits"], remedy


def test_remedies_that_do_not_help_are_left_out() -> None:
    """Offloading moments makes 70B on 8 devices smaller, but not small enough: it is suggested with something else."""
    words, options = TOO_LARGE["too few devices"]
    assert not plan(load_config(None, [*words, "parallel.offload=cpu"]), **options)["fits"]
    remedies = plan(load_config(None, words), **options)["remedies"]
    with_offload = [remedy for remedy in remedies if "parallel.offload" in remedy]
    assert with_offload and all("workers" in line or "activation_offload" in line for line in with_offload)


def test_a_plan_without_remedy_says_so() -> None:
    words = ["model.preset=llama3_70b", "train.seq_len=256", "train.global_batch_size=1", "train.dtype=fp32"]
    (remedy,) = plan(load_config(None, words), workers=1, device="cpu")["remedies"]
    assert remedy.startswith("none found")


@pytest.mark.parametrize(
    ("memory_gib", "verdict"),
    [(90.0, "fits: "), (64.0, "fits, tight: "), (61.0, "does not fit, tight: "), (50.0, "does not fit: ")],
)
def test_verdict_within_three_percent_of_memory_is_tight(memory_gib: float, verdict: str) -> None:
    fixed = ["parallel.activation_checkpointing=selective", "parallel.tp=1", "parallel.pp=1", "parallel.cp=1"]
    words = [*LLAMA_8B, *fixed, "train.micro_batch_size=1", "parallel.zero=3", "train.compile=false"]
    needed = plan(load_config(None, words), gpus_per_node=8, device="h100,memory_gib=90")["best"]["memory_gib"]
    result = plan(load_config(None, words), gpus_per_node=8, device=f"h100,memory_gib={memory_gib * needed / 62.5}")
    assert result["verdict"].startswith(verdict) and result["tight"] == ("tight" in verdict)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"])
def test_a_pipeline_schedule_does_not_matter_to_one_stage(schedule: str) -> None:
    words = ["model.preset=llama3_1b", "train.seq_len=2048", "parallel.pp=1", "train.micro_batch_size=1"]
    same, other = (
        plan(load_config(None, [*words, f"parallel.pp_schedule={name}"]), gpus_per_node=8)["layouts"]
        for name in ("1f1b", schedule)
    )
    assert [row | {"pp_schedule": "1f1b"} for row in other] == same


def test_layouts_that_describe_the_same_run_are_listed_once() -> None:
    """ZeRO shards nothing over one rank; one stage has no pipeline schedule."""
    gpt2 = ["model.preset=gpt2_124m", "train.dtype=bf16", "train.seq_len=1024"]
    rows = plan(load_config(None, gpt2), gpus_per_node=1)["layouts"]
    assert {row["zero"] for row in rows} == {0}
    assert len({(row["micro_batch_size"], row["activation_checkpointing"]) for row in rows}) == len(rows) > 1
    rows = plan(load_config(None, [*gpt2, "parallel.pp_schedule=auto"]), gpus_per_node=2)["layouts"]
    assert {row["pp_schedule"] for row in rows if row["pp"] == 1} == {"1f1b"} < {row["pp_schedule"] for row in rows}
    described = [
        tuple(row[key] for key in ("dp_shard", "tp", "pp", "zero", "pp_schedule", "micro_batch_size")) for row in rows
    ]
    assert len(described) == len(set(described))
    (kept,) = plan(load_config(None, [*gpt2, "parallel.zero=3", "train.micro_batch_size=1"]), gpus_per_node=1)[
        "layouts"
    ]
    assert kept["zero"] == 3, "as it was set"
