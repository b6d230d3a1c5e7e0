"""A plain training loop and its five-line elastic version: without a run, on workers, and with killed workers."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raytrain_hpc as rt
from raytrain_hpc.api import run_script
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError, ModelError
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.script import ScriptRun
from raytrain_hpc.training.script_batches import ScriptBatches
from tests.driver.cli_process import CliRunner

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN, ATTACHED = EXAMPLES / "plain_loop.py", EXAMPLES / "attached_loop.py"
OVERRIDES = [
    "data.path=synthetic",
    "data.engine=local",
    "model.vocab_size=2",
    "train.steps=200",
    "cluster.workers=3",
    "checkpoint.interval=40",
    "logging.tensorboard=false",
]


@pytest.fixture(scope="module")
def plain(cli: CliRunner, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses that the plain script prints."""
    code, output = cli.run_script(tmp_path_factory.mktemp("plain") / "output", PLAIN)
    assert code == 0, output
    return parse_losses(output)


def parse_losses(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]


def read_losses(run_dir: Path) -> list[float]:
    """Return the loss of each step, from its last line."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = {line["step"]: line["train/loss"] for line in lines}
    assert sorted(last) == list(range(1, 201))
    return [last[step] for step in sorted(last)]


def read_incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def test_elastic_version_adds_at_most_five_lines() -> None:
    code = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, ATTACHED)]
    added = [line for line in difflib.ndiff(*code) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 5


def test_without_a_run_it_equals_the_plain_loop(cli: CliRunner, plain: list[float], tmp_path: Path) -> None:
    code, output = cli.run_script(tmp_path / "output", ATTACHED)
    assert code == 0, output
    assert parse_losses(output) == plain


def test_killed_worker_keeps_the_loss_curve(ray_cluster: None, plain: list[float], tmp_path: Path) -> None:
    killed = "fault.inject=[{kind: kill, rank: 1, step: 90}]"
    result = run_script(load_config(None, [f"run.dir={tmp_path}", *OVERRIDES, killed]), ATTACHED, quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 200, 1)
    (incident,) = read_incidents(tmp_path)
    assert (incident["kind"], incident["rank"], incident["steps_lost"]) == ("died", 1, 0)
    assert read_losses(tmp_path) == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_run_resumes_from_its_checkpoint_if_all_workers_are_killed(
    ray_cluster: None, plain: list[float], tmp_path: Path
) -> None:
    script = tmp_path / "slower.py"  # slow enough for a checkpoint to be published first
    script.write_text(ATTACHED.read_text().replace("    scheduler.step()", "    scheduler.step(); time.sleep(0.03)", 1))
    script.write_text(script.read_text().replace("import torch", "import time; import torch", 1))
    killed = ", ".join(f"{{kind: kill, rank: {rank}, step: 90}}" for rank in range(2))
    overrides = [f"run.dir={tmp_path}", *OVERRIDES, f"fault.inject=[{killed}]", "cluster.workers=2"]
    result = run_script(load_config(None, overrides), script, quiet=True)
    assert (result.outcome, result.restarts) == ("done", 1) and read_incidents(tmp_path)[0]["kind"] == "died"
    assert {json.loads(line)["elastic/generation"] for line in (tmp_path / "metrics.jsonl").open()} == {1, 2}
    assert read_losses(tmp_path) == pytest.approx(plain, rel=1e-5, abs=1e-6)


ACCUMULATING_SCRIPT = """
import sys, time
import torch
import raytrain_hpc as rt

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
run = rt.attach(model, optimizer, scheduler)
for step in run.steps(12):
    batch = {"x": torch.randn(10, 3), "y": torch.randn(10, 1)}
    mine = run.local_batch(batch)
    loss = run.backward((model(mine["x"]) - mine["y"]).square().mean())
    if step % 2:  # accumulates gradients of two steps
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if step == 5 and run.is_main_process:
        time.sleep(4)  # like an evaluation: much longer than a step
sys.exit(0)
"""


def test_running_statistics_slow_evaluations_and_gradient_accumulation(ray_cluster: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(ACCUMULATING_SCRIPT)
    overrides = [
        f"run.dir={tmp_path / 'run'}",
        *OVERRIDES,
        "train.steps=12",
        "cluster.workers=2",
        "fault.replica_check_interval=3",
    ]
    result = run_script(load_config(None, overrides), script, quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 12, 0)
    assert not (tmp_path / "run" / "incidents.jsonl").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").exists()


WRONG_SCRIPTS = {
    "steps(7)": "for step in run.steps(7): pass",
    "backward was not called": "for step in run.steps(): pass",
    "have \\[2, 3\\] rows": "for step in run.steps(): run.local_batch((torch.zeros(2), torch.zeros(3)))",
    "attach: called twice": "rt.attach(model, optimizer)",
    "steps: called twice": "next(iter(run.steps())); next(iter(run.steps()))",
    "batch: it holds str": "for step in run.steps(): run.local_batch(['a', 'b'])",
    "ended with exit code 3": "raise SystemExit(3)",
    "outside of the steps": "run.backward(torch.zeros(()))",
    "before run.steps() was exhausted": "pass",
}


@pytest.mark.parametrize("reason", WRONG_SCRIPTS)
def test_script_errors_name_the_mistake(tmp_path: Path, reason: str) -> None:
    """Errors of a script run in this process; workers raise the same ones."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, raytrain_hpc as rt\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"run = rt.attach(model, optimizer)\n{WRONG_SCRIPTS[reason]}\n"
    )
    overrides = [f"run.dir={tmp_path / 'run'}", *OVERRIDES, "cluster.workers=0", "cluster.device=cpu"]
    with pytest.raises(Exception, match=reason.replace("(", r"\(").replace(")", r"\)")):
        run_script(load_config(None, overrides), script, quiet=True)


def test_rows_are_split_contiguously() -> None:
    batching, layout = Batching(4, 2), Layout(dp_replicate=3)
    ranks = [ScriptBatches(layout, rank, batching, is_elastic=False) for rank in range(3)]
    assert [rank.take_rows(8) for rank in ranks] == [range(2), range(2, 5), range(5, 8)]
    script_rank = SimpleNamespace(get_local_rows=ranks[1].take_rows, device=torch.device("cpu"))
    rows = ScriptRun(script_rank, {}).local_batch({"x": torch.arange(8), "pair": (torch.arange(8), torch.zeros(8, 2))})
    assert rows["x"].tolist() == rows["pair"][0].tolist() == [2, 3, 4] and rows["pair"][1].shape == (3, 2)
    with pytest.raises(ModelError, match="a batch of 2 rows for 3 ranks; every rank needs one"):
        ranks[0].take_rows(2)


def test_rows_that_were_taken_a_step_ahead_are_those_of_the_step() -> None:
    rank = ScriptBatches(Layout(dp_replicate=3), 1, Batching(4, 2), is_elastic=False)
    rank.take_rows(8)  # before the loop
    for step in range(3):
        rank.begin_step()
        assert rank.use_rows(step) == 3 / 8
        rank.take_rows(8)
        assert rank.num_rows == 8
    rank.begin_step()
    rank.use_rows(3)
    rank.begin_step()
    with pytest.raises(ModelError, match="step 4: every rank has the whole batch"):
        rank.use_rows(4)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_microbatches_cover_a_batch_and_have_its_weight(is_elastic: bool) -> None:
    """4 microbatches of 2 rows on 3 ranks: the last rank has two, so the others repeat one with weight zero."""
    ranks = [ScriptBatches(Layout(dp_replicate=3), rank, Batching(4, 2), is_elastic=is_elastic) for rank in range(3)]
    parts = [rank.split_rows(len(rank.take_rows(8)), 0) for rank in ranks]
    assert {len(part) for part in parts} == {2} and {one.count for part in parts for one in part} == {
        4 + (not is_elastic)
    }
    counted = [one for part in parts for one in part if one.index is not None]
    assert [one.index for one in counted] == list(range(counted[0].count))
    assert sum(one.weight for part in parts for one in part) == pytest.approx(1.0, abs=1e-15)
    assert sum(one.rows.stop - one.rows.start for one in counted) == 8


def test_missing_script_is_rejected(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path / 'run'}", *OVERRIDES, "cluster.workers=0", "cluster.device=cpu"]
    with pytest.raises(ConfigError, match="no such file"):
        run_script(load_config(None, overrides), tmp_path / "nowhere.py", quiet=True)


def test_without_a_run_the_number_of_steps_is_required() -> None:
    model = torch.nn.Linear(2, 1)
    run = rt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.is_main_process and list(run.steps(2)) == [0, 1] and run.local_batch(model.weight) is model.weight
    with pytest.raises(ModelError, match="steps: count is missing"):
        next(iter(run.steps()))
