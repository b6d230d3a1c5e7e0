"""Benchmarks: the baseline trains the same model, and tables show what was measured."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from raytrain_hpc.bench import overhead
from raytrain_hpc.bench.checkpoint import measure_windows
from raytrain_hpc.bench.checkpoint_formats import build_adamw_state
from raytrain_hpc.bench.contenders import build_baseline_command, read_jsonl, run_process
from raytrain_hpc.bench.nanogpt_baseline import launch_nanogpt
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.snapshots import measure_snapshots
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.errors import RunFailedError
from tests.warm_pool import get_step_metrics, make_small_config


def test_table_aligns_columns_and_json_keeps_unrounded_values():
    table = Table("bench x", ("what", "ratio", "each", "met", "goal"), notes=["how"])
    table.add_row("a", 0.98765, [0.5, 123.456], True, None)
    lines = table.to_markdown().splitlines()
    assert lines[0] == "bench x"
    assert lines[2:5] == [
        "| what | ratio | each      | met | goal |",
        "| ---- | ----- | --------- | --- | ---- |",
        "| a    | 0.988 | 0.500 123 | yes | -    |",
    ]
    assert "- how" in lines
    plain = json.loads(json.dumps(table.to_json()))
    assert plain["rows"] == [{"what": "a", "ratio": 0.98765, "each": [0.5, 123.456], "met": True, "goal": None}]
    assert "torch" in plain["machine"]


def test_a_machine_without_ray_is_described(monkeypatch):
    """Benchmarks of one device run there."""

    def find(name):
        if name == "ray":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("raytrain_hpc.worker.host_info.version", find)
    assert "ray missing pyarrow 1.0" in Table("x", ("a",)).to_json()["machine"]


def test_tiny_differences_are_shown_as_such():
    table = Table("x", ("off by",))
    for value in (0.0, 4.2e-7, 0.001):
        table.add_row(value)
    assert [line.strip("| ") for line in table.to_markdown().splitlines()[4:7]] == ["0.000", "4.2e-07", "0.001"]


def test_table_rejects_a_row_of_the_wrong_length():
    with pytest.raises(ValueError):
        Table("x", ("a", "b")).add_row(1)


def test_overhead_of_an_interval_is_computed_from_every_step(monkeypatch):
    """25 % more per step is 2.5 % if the work is done every ten steps."""
    monkeypatch.setattr(overhead, "launch_platform", lambda *arguments: nullcontext())
    monkeypatch.setattr(overhead, "alternate", lambda *arguments: [(1.0, 1.25)] * 4)
    table = Table("x", ("with", "without", "having", "ratio", "middle", "turns", "goal", "met"))
    periodic = overhead.Case("compared", (), (), 0.97, interval=10)
    for case in (periodic, replace(periodic, interval=1)):
        overhead._measure(case, 1, "127.0.0.1:1", table)
    every_step, amortized, without_interval = table.rows
    assert (every_step["ratio"], every_step["goal"], every_step["met"]) == (0.8, None, None)
    assert amortized["ratio"] == pytest.approx(1 / 1.025) and amortized["having"] == pytest.approx(1.025)
    assert (amortized["with"], amortized["met"]) == ("compared every 10 steps, computed from that", True)
    assert (without_interval["with"], without_interval["ratio"], without_interval["met"]) == ("compared", 0.8, False)


def test_torch_baseline_has_the_losses_of_the_platform(pool, tmp_path):
    """Both sides of `bench step` have the same weights, tokens and optimizer."""
    config = make_small_config(
        tmp_path / "run",
        "train.steps=3",
        "lr_scheduler.name=constant",
        "lr_scheduler.warmup_steps=0",
        "train.micro_batch_size=6",
    )
    steps = tmp_path / "steps.jsonl"
    run_process(
        build_baseline_command(build_baseline_job(config, 1, tmp_path), 1, tmp_path, steps), {"OMP_NUM_THREADS": "1"}
    )
    baseline_losses = [line["loss"] for line in read_jsonl(steps)]
    platform_losses = [step["train/loss"] for step in get_step_metrics(pool.train(config)[0])]
    assert baseline_losses[0] == pytest.approx(platform_losses[0], abs=1e-6)
    assert baseline_losses == pytest.approx(platform_losses, abs=1e-4)


def test_a_clone_of_nanogpt_is_run_as_it_is(tmp_path: Path) -> None:
    """With a train.py that reads its arguments and data as nanoGPT's does, and prints a line per iteration."""
    (tmp_path / "configurator.py").write_text("import sys\nassert '--n_layer=4' in sys.argv[1:]\n")
    (tmp_path / "model.py").write_text("VALUE = 7\n")
    (tmp_path / "train.py").write_text(
        "import os, pickle, time\n"
        "from model import VALUE\n"
        "exec(open('configurator.py').read())\n"
        "assert os.path.getsize('data/random/train.bin') == 2_000_000\n"
        "assert pickle.load(open('data/random/meta.pkl', 'rb'))['vocab_size'] == 65\n"
        "for i in range(10**9):\n"
        "    time.sleep(0.01)\n"
        "    print(f'iter {i}: loss {VALUE}')\n"
    )
    with launch_nanogpt(tmp_path, threads=1) as run:
        run.wait_for_steps(3)
        times = run.read_commit_times()
    assert len(times) >= 3 and times == sorted(times)
    (tmp_path / "model.py").unlink()
    with pytest.raises(RunFailedError, match=r"no model.py there"), launch_nanogpt(tmp_path, threads=1):
        pass


@pytest.mark.parametrize("rows", ["llama3_1b, documents", "llama3_1b, eager", "llama3_1b, microbatch 4"])
def test_rows_of_gpu_speed_run_on_a_tiny_model(tmp_path: Path, rows: str) -> None:
    """A technique that the plain loop lacks has no row of it."""
    command = [sys.executable, "benchmarks/gpu_speed.py", "--dry-run", "--out", str(tmp_path / "out.jsonl")]
    command += ["--rows", rows, "--against", "plain"]
    for options in (["--compile-only", "2"], []) if "eager" in rows else ([], []):
        run_process([*command, *options], {"OMP_NUM_THREADS": "1"})  # the last time, the rows are there already
        assert len(list(tmp_path.iterdir())) == (not options)  # nothing is measured, or nothing has failed
    results = read_jsonl(tmp_path / "out.jsonl")
    names = [rows] if "documents" in rows else [rows, f"{rows}, by plain"]
    assert [result["row"] for result in results] == names
    for result in results:
        assert result["tokens_per_sec"] > 0 and result["product_share"] > 0 and result["attention_kernels"]
        assert result["first_loss"] == pytest.approx(results[0]["first_loss"], rel=1e-6)


def test_medium_workload_has_25_million_parameters():
    weights = [tensor for name, tensor in build_adamw_state().items() if name.startswith("model.")]
    assert sum(tensor.numel() for tensor in weights) == pytest.approx(25e6, rel=0.01)


def test_windows_with_and_without_a_checkpoint_are_separated():
    """Steps take 1 s, and the one after a checkpoint (of steps 20, 40, 60, 80) takes 2 s."""
    unix = [0.0]
    for step in range(2, 83):
        unix.append(unix[-1] + (2.0 if step % 20 == 1 else 1.0))
    with_checkpoint, without_checkpoint = measure_windows(unix)
    assert with_checkpoint == [11.0, 11.0] and without_checkpoint == [10.0, 10.0, 10.0]


def test_snapshots_are_measured_in_all_modes() -> None:
    table = measure_snapshots(make_small_config(None, "cluster.workers=1", "train.steps=30"), torch.device("cpu"))
    assert [row["snapshots"] for row in table.rows] == ["none", "overlapped", "blocking"]
    assert all(row["step s"] > 0 for row in table.rows) and table.rows[0]["additional ms"] == 0.0
