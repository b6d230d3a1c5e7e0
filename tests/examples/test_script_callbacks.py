"""Evaluation and callbacks in scripts: the results of one process, with a kill, and the right checkpoints."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import raytrain_hpc as rt
from raytrain_hpc.api import run_script
from raytrain_hpc.config.loader import load_config
from tests.driver.cli_process import CliRunner
from tests.examples import sharded_scripts as scripts
from tests.examples.test_sharded_scripts import BASE, read_metrics

WORDS = ["train.deterministic=elastic", "train.global_batch_size=12", "train.micro_batch_size=2", "train.steps=16"]
LAYOUTS = {
    "ddp-3": ["cluster.workers=3", "fault.inject=[{kind: kill, rank: 1, step: 7}]"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3", "fault.inject=[{kind: kill, rank: 2, step: 8}]"],
}


class CountHooks(rt.Callback):
    """Counts hooks in its state, and reports the counts with every step."""

    def __init__(self) -> None:
        self.counts = {"pre_optim_step": 0, "post_eval": 0, "steps": 0}

    def pre_optim_step(self) -> None:
        """Count, and look at the gradients."""
        self.counts["pre_optim_step"] += bool(self.context.get_gradients())

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Count evaluations with a loss."""
        self.counts["post_eval"] += "val/loss" in metrics

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Report the counts."""
        self.counts["steps"] += 1
        metrics |= {f"count/{key}": value for key, value in self.counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return self.counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts."""
        self.counts = state


class KillAfterCommit(rt.Callback):
    """Kills a rank once, when it has committed a step."""

    def __init__(self, rank: int, step: int, marker: str) -> None:
        self.rank, self.step, self.marker = rank, step, Path(marker)

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Kill the process of the rank."""
        if (self.context.rank, self.context.step) == (self.rank, self.step) and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def run_evaluating(directory: Path, callbacks: list[Any], *words: str, first: bool) -> Any:
    directory.mkdir(exist_ok=True)
    (directory / "script.py").write_text(scripts.EVALUATING.format(first=first))
    config = load_config(None, [f"run.dir={directory / 'run'}", *BASE, *WORDS, *words])
    return run_script(config, directory / "script.py", callbacks=callbacks, quiet=True)


def run_all(directory: Path, *words: str, first: bool) -> list[dict[str, Any]]:
    callbacks = [CountHooks(), rt.EMA(0.5), rt.KeepBest()]
    assert run_evaluating(directory, callbacks, *words, first=first).outcome == "done"
    keys = ("train/loss", "val/loss", "val/whole/loss", *(f"count/{key}" for key in CountHooks().counts))
    return [{key: step[key] for key in keys if key in step} for step in read_metrics(directory / "run")]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[dict[str, Any]]]:
    """Return the metrics of one process that evaluates before the update of a step, and of one that does after it."""
    directory = tmp_path_factory.mktemp("single")
    return {first: run_all(directory / str(first), "cluster.workers=0", first=first) for first in (True, False)}


@pytest.mark.parametrize(("layout", "first"), [("ddp-3", True), ("ddp-3", False), ("zero3-3", True)])
def test_evaluations_and_callbacks_have_the_bits_of_one_process(
    ray_cluster: None, single: dict[bool, Any], tmp_path: Path, layout: str, first: bool
) -> None:
    metrics = run_all(tmp_path, *LAYOUTS[layout], first=first)
    assert metrics == single[first]
    assert [step["count/pre_optim_step"] for step in metrics] == list(range(1, 17)), "a recomputed step counts once"
    assert sum("val/loss" in step for step in metrics) == (7 if first else 8), "that of step 0 is printed only"
    losses = {number: step["val/loss"] for number, step in enumerate(metrics, 1) if "val/loss" in step}
    labels = json.loads((tmp_path / "run/checkpoints/labels.json").read_text())
    assert labels["best"] == min(losses, key=lambda number: (losses[number], number))


def test_an_evaluation_is_that_of_the_plain_script(cli: CliRunner, tmp_path: Path) -> None:
    """Without a run, and without EMA: the loss of the model on the set, whatever its batches."""
    source = scripts.EVALUATING.format(first=True)
    source = source.replace("        assert model.training", "        print(value, evaluate_plainly())")
    plain = (
        "def evaluate_plainly():\n    model.eval()\n    with torch.no_grad():\n        value = loss(val[:]).item()\n"
        "    model.train()\n    return value\n"
    )
    path = tmp_path / "script.py"
    path.write_text(source.replace("for step, batch", f"{plain}for step, batch", 1))
    code, output = cli.run_script(tmp_path / "output", path)
    assert code == 0, output
    pairs = [line.split() for line in output.splitlines() if len(line.split()) == 2]
    assert len(pairs) == 8
    assert [float(value) for value, _ in pairs] == pytest.approx([float(value) for _, value in pairs], rel=1e-6)


def test_early_stopping_ends_the_loop_and_runs_what_follows(tmp_path: Path) -> None:
    callbacks = [rt.EarlyStopping(patience=2, min_delta=10.0)]
    result = run_evaluating(tmp_path, callbacks, "cluster.workers=0", first=False)
    assert (result.outcome, result.steps) == ("done", 6), "the first of three evaluations is the best"
    assert (tmp_path / "run/checkpoints/step-00000006/manifest.json").exists()
    again = run_evaluating(tmp_path, callbacks, "cluster.workers=0", first=False)
    assert (again.outcome, again.steps) == ("done", 6)


@pytest.mark.parametrize("words", [[], ["parallel.zero=3"]], ids=["ddp", "zero3"])
def test_early_stopping_is_interrupted_between_commit_and_checkpoint(
    ray_cluster: None, tmp_path: Path, words: list[str]
) -> None:
    """The generation that follows has no step left, but the checkpoint of the last one is still to be saved."""
    stopping = [rt.EarlyStopping(patience=2, min_delta=10.0)]
    callbacks = [*stopping, KillAfterCommit(rank=1, step=6, marker=str(tmp_path / "killed"))]
    words = ["cluster.workers=3", *words]
    result = run_evaluating(tmp_path, callbacks, *words, first=False)
    assert (tmp_path / "killed").exists()
    assert (result.outcome, result.steps) == ("done", 6)
    (incident,) = [json.loads(line) for line in (tmp_path / "run/incidents.jsonl").read_text().splitlines()]
    assert (incident["rank"], incident["steps_lost"]) == (1, 0)
    assert [step["step"] for step in read_metrics(tmp_path / "run")] == list(range(1, 7))
    assert (tmp_path / "run/checkpoints/step-00000006/manifest.json").exists()
    assert run_evaluating(tmp_path, stopping, *words, first=False).steps == 6, (
        "the request to stop is in the checkpoint"
    )


def test_an_evaluation_that_is_no_number_is_refused() -> None:
    model = nn.Linear(2, 1)
    run = rt.attach(model, None)
    with pytest.raises(rt.ModelError, match="return the mean loss of a batch"):
        run.evaluate([nn.Parameter(model.weight)], lambda batch: model(batch).repeat(2, 1))
    with pytest.raises(rt.ModelError, match="there is no batch"):
        run.evaluate([], lambda batch: 0.0)
