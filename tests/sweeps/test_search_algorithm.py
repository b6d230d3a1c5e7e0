"""Random and TPE search against optuna used directly, and against each other."""

from __future__ import annotations

from math import log10
from pathlib import Path
from statistics import median

import optuna
import pytest

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.sweeps.parameter import parse_parameters
from raytrain_hpc.sweeps.search_algorithm import GridSearch, OptunaSearch, derive_seed
from raytrain_hpc.sweeps.trial import Trial

OVER = ["optimizer.lr=1e-5..1e-1", "optimizer.beta1=0.5..0.99", "optimizer.name=adamw,sgd", "model.num_layers=1..9"]
DISTRIBUTIONS = {
    "optimizer.lr": optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True),
    "optimizer.beta1": optuna.distributions.FloatDistribution(0.5, 0.99),
    "optimizer.name": optuna.distributions.CategoricalDistribution(("adamw", "sgd")),
    "model.num_layers": optuna.distributions.IntDistribution(1, 9),
}


def evaluate(settings: tuple[str, ...]) -> float:
    """Return an analytic loss with its optimum at lr 2e-3, beta1 0.8, adamw, 5 layers."""
    values = dict(setting.split("=") for setting in settings)
    loss = (log10(float(values["optimizer.lr"])) - log10(2e-3)) ** 2
    loss += 4 * (float(values["optimizer.beta1"]) - 0.8) ** 2 + (values["optimizer.name"] == "sgd")
    return loss + 0.1 * abs(int(values["model.num_layers"]) - 5)


def make_trial(number: int, settings: tuple[str, ...]) -> Trial:
    return Trial(number, settings, Path("none"), "done", 0, evaluate(settings), 10)


def search(name: str, seed: int, num_trials: int, told: list[Trial] | None = None) -> list[Trial]:
    """Return the trials of a search, after those that were told."""
    algorithm, trials = OptunaSearch(parse_parameters(OVER), name, "min", seed), list(told or [])  # type: ignore[arg-type]
    for trial in trials:
        algorithm.tell(trial)
    for number in range(len(trials), num_trials):
        settings = algorithm.ask(number)
        assert settings is not None
        trials.append(make_trial(number, settings))
        algorithm.tell(trials[-1])
    return trials


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_settings_are_those_that_optuna_suggests(name: str) -> None:
    study = optuna.create_study()
    for trial in search(name, 7, 25):
        seed = derive_seed(7, trial.number)
        study.sampler = (
            optuna.samplers.RandomSampler(seed) if name == "random" else optuna.samplers.TPESampler(seed=seed)
        )
        asked = study.ask(DISTRIBUTIONS)
        assert trial.settings == tuple(f"{key}={asked.params[key]}" for key in DISTRIBUTIONS)
        study.tell(asked, trial.value)


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_a_resumed_search_continues_as_without_the_interruption(name: str) -> None:
    whole = search(name, 1, 20)
    assert search(name, 1, 20, whole[:12]) == whole
    assert [trial.settings for trial in search(name, 2, 20)] != [trial.settings for trial in whole]


def test_tpe_finds_better_settings_than_random_search_with_as_many_trials() -> None:
    best = {
        name: [min(trial.value or 0 for trial in search(name, seed, 40)) for seed in range(8)]
        for name in ("random", "tpe")
    }
    wins = sum(tpe < drawn for tpe, drawn in zip(best["tpe"], best["random"], strict=True))
    assert wins >= 6 and median(best["tpe"]) < 0.7 * median(best["random"])


def test_no_settings_are_tried_twice_and_a_small_space_is_exhausted() -> None:
    algorithm = OptunaSearch(
        parse_parameters(["optimizer.name=adamw,sgd", "model.num_layers=1..3"]), "random", "min", 0
    )
    asked = [algorithm.ask(number) for number in range(7)]
    assert len(set(asked[:6])) == 6 and asked[6] is None


def test_stopped_and_failed_trials_are_told_as_such() -> None:
    parameters = parse_parameters(OVER)
    live = OptunaSearch(parameters, "tpe", "max", 0)
    ended = []
    for number, state in enumerate(["done", "stopped early", "failed", "done", "stopped early"]):
        settings = live.ask(number)
        assert settings is not None
        value = None if number >= 3 else 1.5  # a trial can end without the metric
        ended.append(Trial(number, settings, Path("none"), state, 0, value, None if value is None else 4))  # type: ignore[arg-type]
        live.tell(ended[-1])
    restored = OptunaSearch(parameters, "tpe", "max", 0)
    for trial in ended:
        restored.tell(trial)
    for algorithm in (live, restored):
        trials = algorithm._study.get_trials()
        assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "FAIL", "FAIL", "FAIL"]
        assert trials[1].intermediate_values == {4: 1.5} and trials[0].value == 1.5
        assert [trial.params for trial in trials] == [trial.params for trial in live._study.get_trials()]


def test_a_grid_has_all_combinations_and_refuses_ranges() -> None:
    grid = GridSearch(parse_parameters(["optimizer.lr=1e-3,3e-3", "parallel.zero=0,1"]))
    assert [grid.ask(number) for number in range(5)] == [
        ("optimizer.lr=1e-3", "parallel.zero=0"),
        ("optimizer.lr=1e-3", "parallel.zero=1"),
        ("optimizer.lr=3e-3", "parallel.zero=0"),
        ("optimizer.lr=3e-3", "parallel.zero=1"),
        None,
    ]
    with pytest.raises(ConfigError, match="list them, or add --search random"):
        GridSearch(parse_parameters(["optimizer.lr=1e-3..1e-2"]))
