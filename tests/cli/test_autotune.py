"""`plan --measure` and `plan --running` on a running cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.main import main
from raytrain_hpc.planner.calibration import Calibration
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
