"""A plain loop and the same with five lines: by itself, on workers, with one killed, and with all killed."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import raytrain_hpc as rt
from raytrain_hpc.api import run_script
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError, LayoutError, ModelError
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.script import ScriptRun
from raytrain_hpc.training.script_trainer import ScriptTrainer

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAIN, ATTACHED = EXAMPLES / "plain_loop.py", EXAMPLES / "attached_loop.py"
WORDS = [
    "data.path=synthetic",
    "data.engine=local",
    "model.vocab_size=2",
    "train.steps=200",
    "cluster.workers=3",
    "checkpoint.every=40",
    "observe.tensorboard=false",
]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """The losses that the plain script prints."""
    done = subprocess.run([sys.executable, PLAIN], capture_output=True, text=True, check=True, timeout=120)
    return losses_in(done.stdout)


def losses_in(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step ")]


def losses(run_dir: Path) -> list[float]:
    """Of every step, from the line that counts."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = {line["step"]: line["train/loss"] for line in lines}
    assert sorted(last) == list(range(1, 201))
    return [last[step] for step in sorted(last)]


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]


def test_five_lines_differ() -> None:
    code = [path.read_text().partition('"""\n\n')[2].splitlines() for path in (PLAIN, ATTACHED)]
    added = [line for line in difflib.ndiff(*code) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 5


def test_alone_it_is_the_plain_loop(plain: list[float]) -> None:
    done = subprocess.run([sys.executable, ATTACHED], capture_output=True, text=True, check=True, timeout=120)
    assert losses_in(done.stdout) == plain


def test_a_worker_killed_in_the_middle(ray_cluster: None, plain: list[float], tmp_path: Path) -> None:
    killed = "fault.inject=[{kind: kill, rank: 1, step: 90}]"
    result = run_script(load_config(None, [f"run.dir={tmp_path}", *WORDS, killed]), ATTACHED, quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 200, 1)
    (incident,) = incidents(tmp_path)
    assert (incident["kind"], incident["rank"], incident["steps_lost"]) == ("died", 1, 0)
    assert losses(tmp_path) == pytest.approx(plain, rel=1e-5, abs=1e-6)


def test_all_workers_killed_and_the_run_goes_on_from_its_checkpoint(
    ray_cluster: None, plain: list[float], tmp_path: Path
) -> None:
    script = tmp_path / "slower.py"  # so that a checkpoint is there by then
    script.write_text(ATTACHED.read_text().replace("    scheduler.step()", "    scheduler.step(); time.sleep(0.03)", 1))
    script.write_text(script.read_text().replace("import torch", "import time; import torch", 1))
    killed = ", ".join(f"{{kind: kill, rank: {rank}, step: 90}}" for rank in range(2))
    words = [f"run.dir={tmp_path}", *WORDS, f"fault.inject=[{killed}]", "cluster.workers=2"]
    result = run_script(load_config(None, words), script, quiet=True)
    assert (result.outcome, result.restarts) == ("done", 1) and incidents(tmp_path)[0]["kind"] == "died"
    assert {json.loads(line)["elastic/generation"] for line in (tmp_path / "metrics.jsonl").open()} == {1, 2}
    assert losses(tmp_path) == pytest.approx(plain, rel=1e-5, abs=1e-6)


OTHER = """
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
    if step % 2:  # gradients of two steps together
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if step == 5 and run.is_main_process:
        time.sleep(4)  # an evaluation: many times as long as a step
sys.exit(0)
"""


def test_running_statistics_slow_evaluations_and_gradients_of_several_steps(ray_cluster: None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OTHER)
    words = [f"run.dir={tmp_path / 'run'}", *WORDS, "train.steps=12", "cluster.workers=2", "fault.compare_every=3"]
    result = run_script(load_config(None, words), script, quiet=True)
    assert (result.outcome, result.steps, result.restarts) == ("done", 12, 0)
    assert not (tmp_path / "run" / "incidents.jsonl").exists()
    assert (tmp_path / "run" / "checkpoints" / "step-00000012" / "manifest.json").exists()


SCRIPTS = {
    "steps(7)": "for step in run.steps(7): pass",
    "backward was not called": "for step in run.steps(): pass",
    "have \\[2, 3\\] rows": "for step in run.steps(): run.local_batch((torch.zeros(2), torch.zeros(3)))",
    "attach: called twice": "rt.attach(model, optimizer)",
    "backward was called twice": "for step in run.steps(): [run.backward(model(torch.ones(1, 2)).sum()) for _ in '12']",
    "asked for twice": "next(iter(run.steps())); next(iter(run.steps()))",
    "a batch holds str": "for step in run.steps(): run.local_batch(['a', 'b'])",
    "ended with exit code 3": "raise SystemExit(3)",
    "outside of the steps": "run.backward(torch.zeros(()))",
    "without going through the steps": "pass",
}


@pytest.mark.parametrize("reason", SCRIPTS)
def test_what_a_script_does_wrong(tmp_path: Path, reason: str) -> None:
    """In this process: what a worker says is the same."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, raytrain_hpc as rt\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"run = rt.attach(model, optimizer)\n{SCRIPTS[reason]}\n"
    )
    words = [f"run.dir={tmp_path / 'run'}", *WORDS, "cluster.workers=0", "cluster.device=cpu"]
    with pytest.raises(Exception, match=reason.replace("(", r"\(").replace(")", r"\)")):
        run_script(load_config(None, words), script, quiet=True)


def test_rows_are_shared_out_in_runs() -> None:
    places = [SimpleNamespace(layout=Layout(dp_replicate=3), rank=rank) for rank in range(3)]
    ranks = [SimpleNamespace(context=place, _row_counts=[]) for place in places]
    assert [ScriptTrainer.get_local_rows(rank, 8) for rank in ranks] == [range(2), range(2, 5), range(5, 8)]
    mine = SimpleNamespace(
        get_local_rows=lambda rows: ScriptTrainer.get_local_rows(ranks[1], rows), device=torch.device("cpu")
    )
    shared = ScriptRun(mine).local_batch({"x": torch.arange(8), "pair": (torch.arange(8), torch.zeros(8, 2))})
    assert shared["x"].tolist() == shared["pair"][0].tolist() == [2, 3, 4] and shared["pair"][1].shape == (3, 2)
    with pytest.raises(ModelError, match="a batch of 2 rows for 3 ranks; every rank needs one"):
        ScriptTrainer.get_local_rows(ranks[0], 2)


def test_what_no_script_can_be_run_on(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path / 'run'}", *WORDS, "cluster.workers=0", "cluster.device=cpu"]
    with pytest.raises(ConfigError, match="no such file"):
        run_script(load_config(None, words), tmp_path / "nowhere.py", quiet=True)
    sharded = load_config(None, [*words, "parallel.zero=1", "cluster.workers=2"])
    with pytest.raises(LayoutError, match="a script's own optimizer needs unsharded parameters"):
        run_script(sharded, ATTACHED, quiet=True)


def test_alone_a_number_of_steps_is_needed() -> None:
    model = torch.nn.Linear(2, 1)
    run = rt.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert run.is_main_process and list(run.steps(2)) == [0, 1] and run.local_batch(model.weight) is model.weight
    with pytest.raises(ModelError, match="steps: how many"):
        next(iter(run.steps()))
