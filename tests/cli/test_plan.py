"""`raytrain-hpc plan`: its output as text and as JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from raytrain_hpc.cli.main import main

PROMISED = {
    *("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero", "pp_schedule", "micro_batch_size", "grad_acc"),
    *("step_time_s", "tokens_per_sec", "mfu", "memory_gib", "fits", "why"),
}
MODEL = ["model.hidden_size=2048", "model.num_layers=16", "model.num_heads=16", "train.dtype=bf16"]
BATCH = ["train.global_batch_size=64", "train.seq_len=2048", "--nodes", "2", "--gpus-per-node", "4", "--device", "a100"]


def run(*argv: str) -> Result:
    return CliRunner().invoke(main, ["plan", *argv], catch_exceptions=False)


def test_json_has_all_documented_keys() -> None:
    made = json.loads(run(*MODEL, *BATCH, "--json").output)
    assert {"verdict", "best", "layouts"} <= made.keys() and made["best"] == made["layouts"][0]
    assert all(row.keys() >= PROMISED for row in made["layouts"])
    assert made["machine"]["device"]["name"] == "a100" and made["workers"] == 8
    assert len(made["layouts"]) == len({json.dumps({**row, "why": "", "seconds": 0}) for row in made["layouts"]})


def test_text_shows_verdict_budget_and_layouts() -> None:
    lines = run(*MODEL, *BATCH, "--tokens", "1e9").output.splitlines()
    assert lines[0].startswith("verdict       fits") and any("2 x 4 a100" in line for line in lines)
    assert any(line.startswith("budget        1e+09 tokens") for line in lines)
    assert any("slower" in line for line in lines) and lines[-1].endswith("--json prints all")


def test_plan_that_does_not_fit_exits_with_1_and_says_so_in_help() -> None:
    words = ["model.preset=llama3_70b", "--nodes", "1", "--gpus-per-node", "2"]
    result = run(*words)
    assert result.exit_code == 1 and result.output.startswith("verdict       does not fit")
    assert run(*words, "--json").exit_code == 1 and run(*MODEL, *BATCH).exit_code == 0
    assert "Exit code 1" in run("--help").output


def test_axes_that_miss_the_devices_are_named() -> None:
    result = run("parallel.zero=3", "parallel.dp_shard=64", "--workers", "8", "--device", "h100")
    assert result.exit_code == 2
    assert "parallel.dp_shard=64 (command line): dp_replicate=1 x dp_shard=64 makes 64 ranks, not 8" in result.output
    assert "use 64 devices" in result.output and "cluster.workers" not in result.output


def test_without_arguments_the_quickstart_is_planned() -> None:
    lines = run().output.splitlines()
    assert any(line == "layout        1 rank" for line in lines)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--device", "h1000"], "known: a100"),
        (["--device", "h100,memory=64"], "'memory' is not a field of device; use one of: tflops"),
        (["--device", "h100,memory_gib=much"], "'much' must be a number above 0"),
        (["--device", "h100", "--nodes", "2", "--across", "ethernet,gbs=0"], "'0' must be a number above 0"),
        (["parallel.tp=3", "--nodes", "1", "--gpus-per-node", "8"], "parallel.tp=3"),
        (["model.preset=llama3_8b", "parallel.pp=[64]", "--nodes", "8"], "parallel.pp"),
        (
            ["train.global_batch_size=2", "parallel.tp=1", "parallel.cp=1", "parallel.pp=1", "--nodes", "1"],
            "global_batch_size",
        ),
    ],
)
def test_impossible_settings_are_rejected_by_name(argv: list[str], named: str) -> None:
    result = run(*argv)
    assert result.exit_code == 2 and named in result.output and result.output.count("\n") == 1


def test_overridden_device_numbers_change_the_plan() -> None:
    words = ["model.preset=llama3_8b", "--nodes", "2", "--gpus-per-node", "8", "--json"]
    usual, small, slow = (
        json.loads(run(*words, *more).output)["best"]
        for more in (
            ["--device", "h100"],
            ["--device", "h100,memory_gib=20"],
            ["--device", "h100", "--across", "ethernet,gbs=0.5"],
        )
    )
    assert small["memory_gib"] < 20 < usual["memory_gib"]
    assert slow["step_time_s"] > 1.1 * usual["step_time_s"], "other layouts are best if links between nodes are slow"
