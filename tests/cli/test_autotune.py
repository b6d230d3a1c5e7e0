"""`plan --measure` and `plan --running` on a running cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from raytrain_hpc.config.loader import complete_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import RaytrainError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import make_machine
from raytrain_hpc.planner.measured_links import load_calibration
from tests.warm_pool import SMALL_OVERRIDES

pytestmark = pytest.mark.timeout(200)


def test_plan_measure_trains_the_best_layouts_and_saves_the_calibration(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))
    words = [
        *SMALL_OVERRIDES,
        f"run.dir={tmp_path / 'runs' / 'a'}",
        "cluster.workers=2",
        "parallel.zero=[0,1]",
        "parallel.tp=1",
    ]
    words += ["train.micro_batch_size=3", "parallel.pp=1", "parallel.cp=1", "parallel.activation_checkpointing=none"]
    done = CliRunner().invoke(main, ["plan", *words, "--measure", "2", "--steps", "4", "--json"])
    assert done.exit_code == 0, done.output
    tuned = json.loads(done.stdout)
    assert [row["layout"]["zero"] for row in tuned["layouts"]] in ([0, 1], [1, 0])
    assert all(row["measured_s"] > 0 and row["expected_s"] > 0 and not row["failed"] for row in tuned["layouts"])
    assert Calibration(**tuned["after"]) == load_calibration("cpu") != Calibration(**tuned["before"])
    assert list((tmp_path / "runs").iterdir()) == [], "trial runs are removed"

    running = CliRunner().invoke(main, ["plan", *words, "--running", "--json"])
    assert running.exit_code == 0, running.output
    planned = json.loads(running.stdout)
    assert (planned["workers"], planned["calibration"]) == (2, tuned["after"])
    assert planned["machine"]["device"]["name"] == "cpu" and planned["placement"] == "all on one node"


@pytest.mark.parametrize(
    "words",
    [
        ["llama3_8b"],  # with 2000 steps of warmup
        ["data.sources=[{path: a}, {path: b}]", "data.stages=[{from_tokens: 1e6, weights: [1, 2]}]"],
        ["checkpoint.local_dir=/dev/shm/a", "checkpoint.interval=10", "checkpoint.upload_interval=100"],
        ["logging.wandb_project=a", "logging.mlflow_uri=sqlite:///a", "logging.trackers=[a]", "logging.prompts=[a]"],
        ["train.callbacks=[early_stopping]", "fault.inject=[{kind: kill, step: 3}]", "profiler.name=torch"],
    ],
)
def test_trials_of_plan_measure_are_valid_runs_without_side_effects(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Config] = []

    def train(config: Config, quiet: bool) -> None:
        complete_config(config)
        trained.append(config)
        raise RaytrainError("no cluster")

    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("raytrain_hpc.api.train", train)
    monkeypatch.setattr(
        "raytrain_hpc.driver.cluster_probe.inspect_running_cluster", lambda config: make_machine("h200", 1, 8)
    )
    done = CliRunner().invoke(main, ["plan", *words, f"run.dir={tmp_path / 'a'}", "--measure", "2", "--steps", "6"])
    assert done.exit_code == 4, "no layout was trained"
    assert done.stdout.count("failed: no cluster") == len(trained) > 0
    for config in trained:
        assert (config.train.steps, config.lr_scheduler.warmup_steps <= 8) == (8, True)
        assert config.train.callbacks == config.fault.inject == config.logging.prompts == config.logging.trackers == []
        names = (config.logging.wandb_project, config.logging.mlflow_uri, config.checkpoint.local_dir)
        assert (*names, config.profiler.name) == ("", "", "", "none")
