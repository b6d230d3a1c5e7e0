"""Evaluations of scripts in this process: what they record and save, and what they leave as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain_hpc as rt
from raytrain_hpc.api import run_script
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ModelError
from tests.examples.test_sharded_scripts import BASE

START = """
import torch
import raytrain_hpc as rt
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
val = [x[:12], x[12:16]]
def loss(rows):
    return (model(rows) - rows.sum(1, keepdim=True)).square().mean()
def update():
    run.backward(loss(run.local_batch(torch.randn(8, 3))))
    optimizer.step()
    optimizer.zero_grad()
"""
ATTACH = "run = rt.attach(model, optimizer)\n"


class DrawingCallback(rt.Callback):
    """Draws random numbers in every hook that surrounds a step or an evaluation."""

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Draw."""
        torch.randn(3)
        metrics["eval/draws"] = 1

    pre_eval = pre_train = pre_optim_step = pre_step = lambda self: torch.randn(3)
    post_commit = post_step = lambda self, metrics: torch.randn(3)


def run(directory: Path, body: str, *words: str, callbacks: Any = (), attach: str = ATTACH) -> list[dict[str, Any]]:
    """Run a script in this process; return all lines of its metrics."""
    directory.mkdir(exist_ok=True)
    (directory / "script.py").write_text(START + attach + body)
    settings = [f"run.dir={directory / 'run'}", *BASE, "cluster.workers=0", "checkpoint.interval=0", *words]
    run_script(load_config(None, settings), directory / "script.py", callbacks=callbacks, quiet=True)
    return [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]


def list_checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in (directory / "run/checkpoints").glob("step-*"))


EVALUATE_FIRST = "for step in run.steps():\n    run.evaluate(val, loss)\n    update()\nrun.evaluate(val, loss)\n"


def test_every_step_has_the_loss_of_its_state_and_is_saved_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KeepBest beside checkpoints that are due; the last state is evaluated after the loop."""
    words = ["train.steps=6", "checkpoint.interval=2", "checkpoint.keep=10"]
    lines = run(tmp_path, EVALUATE_FIRST, *words, callbacks=[rt.KeepBest()])
    last = {line["step"]: line for line in lines}
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6], "the last one again, evaluated"
    assert "alarm" not in capsys.readouterr().out
    losses = [last[step]["val/loss"] for step in range(1, 7)]
    labels = json.loads((tmp_path / "run/checkpoints/labels.json").read_text())
    assert labels["best"] == 1 + losses.index(min(losses))
    after = "for step in run.steps():\n    update()\n    run.evaluate(val, loss)\n"
    assert [line["val/loss"] for line in run(tmp_path / "after", after, "train.steps=6")] == losses


def test_a_resumed_run_completes_the_record_of_its_last_step(tmp_path: Path) -> None:
    body = "for step in run.steps():\n    if step:\n        run.evaluate(val, loss)\n    update()\n"
    run(tmp_path, body, "train.steps=3")
    resumed = run(tmp_path, body, "train.steps=5")
    whole = run(tmp_path / "whole", body, "train.steps=5")
    last = {line["step"]: line.get("val/loss") for line in resumed}
    assert last == {line["step"]: line.get("val/loss") for line in whole}


def test_a_request_to_save_is_that_of_its_step(tmp_path: Path) -> None:
    body = (
        "for step in run.steps():\n    if step == 2:\n        run.save()\n    run.evaluate(val, loss)\n    update()\n"
    )
    run(tmp_path, body, "train.steps=5")
    assert list_checkpoints(tmp_path) == [3, 5]


def test_callbacks_and_evaluations_leave_random_generators(tmp_path: Path) -> None:
    shuffled = EVALUATE_FIRST.replace("val, loss", "torch.utils.data.DataLoader(x, 4, shuffle=True), loss")
    plain = run(tmp_path / "plain", "for step in run.steps():\n    update()\n", "train.steps=5")
    drawing = run(tmp_path / "drawing", shuffled, "train.steps=5", callbacks=[DrawingCallback()])
    assert drawing[0]["eval/draws"] == 1
    by_step = {line["step"]: line["train/loss"] for line in drawing}
    assert [by_step[line["step"]] for line in plain] == [line["train/loss"] for line in plain]


def test_a_failed_evaluation_gives_the_weights_back(tmp_path: Path) -> None:
    """The averages of EMA are in the model while it is evaluated."""
    failing = (
        "def fail(rows):\n    raise ValueError('no')\n"
        "for step in run.steps():\n    before = model[0].weight.clone()\n    try:\n        run.evaluate(val, fail)\n"
        "    except ValueError:\n        run.log({'same': float((before == model[0].weight).all())})\n    update()\n"
    )
    lines = run(tmp_path, failing, "train.steps=4", callbacks=[rt.EMA(0.5)])
    assert [line["same"] for line in lines] == [1.0] * 4


def test_an_object_of_any_name_is_restored(tmp_path: Path) -> None:
    attach = (
        "class Count:\n    n = 0\n    def state_dict(self): return {'n': self.n}\n"
        "    def load_state_dict(self, state): self.n = state['n']\ncount = Count()\n"
        "run = rt.attach(model, optimizer, progress=count)\n"
    )
    body = "for step in run.steps():\n    count.n += 1\n    run.log({'n': count.n})\n    update()\n"
    run(tmp_path, body, "train.steps=3", attach=attach)
    assert run(tmp_path, body, "train.steps=6", attach=attach)[-1]["n"] == 6


@pytest.mark.parametrize("is_second", [False, True])
def test_a_loop_over_microbatches_that_is_left_is_an_error(tmp_path: Path, is_second: bool) -> None:
    loop = "    for rows in run.microbatches(batch):\n        run.backward(loss(rows))\n"
    left = f"{loop}        break\n    optimizer.step()\n"
    body = f"for step in run.steps():\n    batch = run.local_batch(x[:8])\n{loop if is_second else ''}{left}"
    with pytest.raises(ModelError, match="loop over run.microbatches was left before its end"):
        run(tmp_path, body, "train.steps=3", "train.global_batch_size=8", "train.micro_batch_size=2")
