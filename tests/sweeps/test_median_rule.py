"""Median stopping against optuna's pruner, and among trials that run side by side."""

from __future__ import annotations

import random

import optuna
import pytest

from raytrain_hpc.sweeps.median_rule import MIN_TRIALS, Curve, find_worse_than_median


@pytest.mark.parametrize("mode", ["min", "max"])
def test_one_trial_after_another_is_stopped_where_optuna_would_prune_it(mode: str) -> None:
    numbers, min_steps, num_stopped = random.Random(0), 3, 0
    pruner = optuna.pruners.MedianPruner(n_startup_trials=MIN_TRIALS, n_warmup_steps=min_steps, n_min_trials=MIN_TRIALS)
    study = optuna.create_study(direction=f"{mode}imize", pruner=pruner)
    complete: list[Curve] = []
    for _ in range(40):
        trial, points, level = study.ask(), {}, numbers.uniform(0, 2)
        for step in range(1, 12):
            points[step] = level + numbers.gauss(0, 0.5) + 1 / step
            trial.report(points[step], step)
            worse = find_worse_than_median(points, complete, mode, min_steps)  # type: ignore[arg-type]
            assert (worse is not None) == trial.should_prune()
            if worse is not None:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                num_stopped += 1
                break
        else:
            study.tell(trial, points[11])
            complete.append(Curve(points))
    assert 5 < num_stopped < 35


def test_trials_side_by_side_are_not_stopped_down_to_the_best() -> None:
    """Half of them stop at the first step that is compared; the others are then better than those that stopped."""
    curves = {level: {step: level + 1 / step for step in range(1, 6)} for level in range(8)}
    stopped = {
        level
        for level, points in curves.items()
        if find_worse_than_median(points, [Curve(other) for key, other in curves.items() if key != level], "min", 5)
    }
    assert stopped == {4, 5, 6, 7}
    later = {level: points | {6: level + 1 / 6} for level, points in curves.items() if level not in stopped}
    for level, points in later.items():
        others = [Curve(other) for key, other in later.items() if key != level]
        others += [Curve(curves[key], is_stopped=True) for key in stopped]
        assert find_worse_than_median(points, others, "min", 5) is None


def test_a_comparison_needs_enough_steps_and_trials() -> None:
    good, bad = [Curve({4: 1.0}), Curve({4: 2.0}), Curve({4: 3.0})], {3: 9.0, 4: 8.0}
    worse = find_worse_than_median(bad, good, "min", 4)
    assert worse is not None and (worse.step, worse.best, worse.median, worse.num_trials) == (4, 8.0, 2.0, 3)
    assert find_worse_than_median(bad, good, "min", 5) is None
    assert find_worse_than_median(bad, good[:2], "min", 4) is None
    assert find_worse_than_median({3: 1.5, 4: 8.0}, good, "min", 4) is None  # has been good
    assert find_worse_than_median(bad, good, "max", 4) is None
    assert find_worse_than_median({}, good, "min", 0) is None


def test_a_trial_ahead_of_the_others_is_compared_where_they_are() -> None:
    others = [Curve({2: 1.0, 4: 1.0, 6: 1.0}), Curve({2: 2.0, 4: 2.0}), Curve({2: 3.0, 4: 3.0, 5: 3.0})]
    worse = find_worse_than_median({2: 9.0, 4: 8.0, 6: 0.1}, others, "min", 2)
    assert worse is not None and (worse.step, worse.best, worse.median) == (4, 8.0, 2.0)
    assert find_worse_than_median({2: 9.0, 4: 1.5, 6: 9.0}, others, "min", 2) is None
    assert find_worse_than_median({1: 9.0, 3: 9.0}, others, "min", 0) is None  # no step in common
