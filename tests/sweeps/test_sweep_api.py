"""rt.sweep: the trials are those of rt.train, with objects of the caller; wrong arguments are refused at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raytrain_hpc as rt
from raytrain_hpc.config.loader import build_config, list_settings
from raytrain_hpc.storage.object_path import ObjectPath
from tests.storage.s3_server import S3Server
from tests.warm_pool import make_small_config

IN_PROCESS = ["cluster.workers=0", "cluster.device=cpu", "train.steps=4", "logging.tensorboard=false"]


def read_losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_trials_with_objects_of_the_caller_are_the_runs_of_train(tmp_path: Path) -> None:
    class Regression(nn.Module):  # a class that no other process can import
        def __init__(self, width: int):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.layers(x)
            return output

    def build(config: rt.Config) -> nn.Module:
        return Regression(config.model.hidden_size)

    def compute_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square().sum()

    class CountSteps(rt.Callback):
        def post_step(self, metrics: dict[str, Any]) -> None:
            metrics["user/steps"] = self.context.step

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 3, generator=generator)
    samples = list(zip(inputs, inputs.sum(1), strict=True))
    arguments: dict[str, Any] = {
        "model": build,
        "loss": compute_loss,
        "dataset": samples,
        "val_dataset": samples[:16],
        "lr_schedule": lambda step: 1 / (step + 1),
        "callbacks": [CountSteps()],
    }
    config = make_small_config(tmp_path / "sweep", *IN_PROCESS, "train.seq_len=1")
    config.optimizer.weight_decay = 0.25  # a change after loading counts
    over = {"optimizer.lr": [0.1, 0.01], "model.hidden_size": [8]}
    counted = rt.sweep(config, over, metric="user/steps", mode="max", at_once=2, quiet=True, **arguments)
    assert [trial.value for trial in counted.trials] == [4, 4]  # a metric of the caller's callback
    result = rt.sweep(config, over, quiet=True, **arguments)
    assert result.is_complete and [trial.state for trial in result.trials] == ["done", "done"]
    assert [trial.parameters for trial in result.trials] == [
        {"optimizer.lr": 0.1, "model.hidden_size": 8},
        {"optimizer.lr": 0.01, "model.hidden_size": 8},
    ]
    assert not (tmp_path / "sweep/arguments.pickle").exists()
    for trial in result.trials:
        alone = make_small_config(tmp_path / f"alone-{trial.number}", *IN_PROCESS, "train.seq_len=1", *trial.settings)
        alone.optimizer.weight_decay = 0.25
        trained = rt.train(alone, quiet=True, **arguments)
        assert trial.value == trained.val_loss
        assert read_losses(trial.run_dir) == read_losses(Path(alone.run.dir))
        assert '"user/steps": 4' in (trial.run_dir / "metrics.jsonl").read_text()
    assert result.best is min(result.trials, key=lambda trial: trial.value or 0.0)
    assert result.report == tmp_path / "sweep/report.html" and "optimizer.lr" in result.report.read_text()
    assert str(result).splitlines()[1].startswith(" ".join(result.best.settings))
    again = rt.sweep(config, ["optimizer.lr=0.1,0.01", "model.hidden_size=8"], quiet=True, **arguments)
    assert again.trials == result.trials
    assert (result.trials[0].run_dir / "output.log").read_text().count("done: 4 steps") == 1


def test_a_sweep_in_an_object_store_has_the_values_of_a_local_one_and_continues(
    s3: S3Server, folder: ObjectPath, tmp_path: Path
) -> None:
    config = make_small_config(None, *IN_PROCESS)
    config.run.dir = str(folder)
    first = rt.sweep(config, {"optimizer.lr": [0.1]}, metric="train/loss", quiet=True)
    result = rt.sweep(config, {"optimizer.lr": [0.1, 0.01]}, metric="train/loss", stop_bad=True, quiet=True)
    assert result.is_complete and result.trials[0] == first.trials[0]
    for trial in result.trials:
        local = make_small_config(tmp_path / f"local-{trial.number}", *IN_PROCESS, *trial.settings)
        assert trial.value == rt.train(local, quiet=True).train_loss
        assert s3.read(f"runs/demo/{trial.name}/output.log").count(b"done: 4 steps") == 1
    names = ["report.html", "sweep.json", *(f"{trial.name}/result.json" for trial in result.trials)]
    assert {f"runs/demo/{name}" for name in names} <= set(s3.list_keys("runs/demo/"))
    assert str(result.report) == f"{folder}/report.html"
    assert "optimizer.lr" in str(result) and str(result).splitlines()[1].split()[1] != "-"


@pytest.mark.parametrize(
    "over, arguments, error, reason",
    [
        ({"optimizer.lr": 0.1}, {}, rt.ConfigError, "optimizer.lr=0.1 .*needs a list of values, or a range as text"),
        ({"data.path": ["a,b"]}, {}, rt.ConfigError, "a comma separates values"),
        ({"optimizer.lrr": [0.1]}, {}, rt.ConfigError, "no such key; did you mean optimizer.lr"),
        ({"optimizer.lr": "0.1..1"}, {}, rt.ConfigError, "a grid needs values"),
        (
            {"optimizer.lr": [0.1]},
            {"search": "gird"},
            rt.ConfigError,
            "--search='gird'.*needs one of grid, random, tpe",
        ),
        ({"optimizer.lr": [0.1]}, {"mode": "low"}, rt.ConfigError, "--mode='low'.*needs one of min, max"),
        ({"optimizer.lr": [0.1]}, {"at_once": 0}, rt.ConfigError, "--at-once=0.*needs at least 1"),
        ({"optimizer.lr": [0.1]}, {"trials": 3}, rt.ConfigError, "--trials=3.*a grid trains all combinations"),
        ({"optimizer.lr": [0.1]}, {"model": lambda config: nn.Linear(1, 1)}, rt.ModelError, "must be given together"),
        ({"optimizer.lr": [0.1]}, {"modle": 1}, TypeError, "modle"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tmp_path: Path, over: Any, arguments: dict[str, Any], error: type[Exception], reason: str
) -> None:
    config = make_small_config(tmp_path / "sweep", *IN_PROCESS)
    with pytest.raises(error, match=reason):
        rt.sweep(config, over, quiet=True, **arguments)
    assert not (tmp_path / "sweep").exists()


def test_an_argument_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    lock = threading.Lock()
    config = make_small_config(tmp_path / "sweep", *IN_PROCESS)
    with pytest.raises(
        rt.ModelError, match="each trial needs a copy of lr_schedule, which cannot be pickled: TypeError"
    ):
        rt.sweep(config, {"optimizer.lr": [0.1]}, quiet=True, lr_schedule=lambda step: float(lock is not None))
    assert not list((tmp_path / "sweep").glob("*=*"))


def test_a_config_is_built_again_from_its_settings() -> None:
    words = ["model.preset=llama3_8b", "parallel.tp=[1,2]", "run.name=x", "data.path=/data/${run.name}"]
    config = rt.load_config(None, words)
    config.train.steps = 7
    again = build_config(list_settings(config))
    assert again == config and again.auto_choices == config.auto_choices
    assert again.origins == config.origins | {"train.steps": ""}
    # Presets and references follow what is changed later.
    other = build_config([*list_settings(config), *list_settings(rt.load_config(None, ["run.name=y"]))])
    assert (other.data.path, other.train.steps, other.model.hidden_size) == ("/data/y", 7, 4096)
    by_hand = rt.Config()
    by_hand.model.num_layers = 3
    assert build_config(list_settings(by_hand)) == by_hand
