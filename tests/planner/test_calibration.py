"""Calibration: numbers that fit measured steps, and where they are saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.calibration import Calibration, refit
from raytrain_hpc.planner.cost_model import CostModel
from raytrain_hpc.planner.hardware import make_machine
from raytrain_hpc.planner.measured_links import load_calibration, save_calibration
from raytrain_hpc.planner.search import rank_layouts
from raytrain_hpc.planner.search_space import build_search_space
from raytrain_hpc.planner.workload import make_workload


@pytest.mark.parametrize("true", [Calibration(0.3, 5e-4, 0.7, 0.2), Calibration(0.8, 2e-5, 0.1, 0.6)])
def test_refit_recovers_a_calibration_from_its_predictions(true: Calibration) -> None:
    config = load_config(None, ["model.preset=llama3_8b", "train.global_batch_size=256", "train.dtype=bf16"])
    spec, cluster = (
        resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len),
        make_machine("h100", 2, 8),
    )
    choices = [
        estimate.choice
        for estimate in rank_layouts(
            config, spec, cluster, Calibration(), build_search_space(config, has_accelerator=True)
        )
        if estimate.fits
    ][::40]

    def predict(calibration: Calibration) -> list[float]:
        model = CostModel(make_workload(config, spec), cluster, calibration)
        return [model.estimate_step(choice).total for choice in choices]

    measured, before = predict(true), predict(Calibration())
    refitted = predict(refit(predict, measured, Calibration()))
    assert max(abs(estimate / measured_s - 1) for estimate, measured_s in zip(before, measured, strict=True)) > 0.3
    assert max(abs(estimate / measured_s - 1) for estimate, measured_s in zip(refitted, measured, strict=True)) < 0.05


def test_refit_without_measurements_keeps_the_calibration() -> None:
    assert refit(lambda calibration: [], [], Calibration()) == Calibration()


def test_calibrations_are_saved_per_device(tmp_path: Path) -> None:
    assert load_calibration("h100", tmp_path) == Calibration()
    path = save_calibration("h100", Calibration(0.5), tmp_path)
    save_calibration("cpu", Calibration(0.9), tmp_path)
    assert (
        load_calibration("h100", tmp_path) == Calibration(0.5) and load_calibration("a100", tmp_path) == Calibration()
    )
    path.write_text('{"h100": {"speed": 3}}')
    with pytest.raises(ConfigError, match=r"calibration.json.*measure again"):
        load_calibration("h100", tmp_path)
