"""`raytrain-hpc plan --measure`: the best layouts tried on the cluster at hand, and the calibration that fits them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from raytrain_hpc.config.model_spec import resolve_shape
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import LayoutError, RaytrainError
from raytrain_hpc.planner.calibration import Calibration, refit
from raytrain_hpc.planner.cost_model import CostModel
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.measured_links import known_calibration, remember_calibration
from raytrain_hpc.planner.search import Estimate, rank
from raytrain_hpc.planner.search_space import free_keys, settled
from raytrain_hpc.planner.workload import work_of

_WARMUP = 2  # steps that do not count


@dataclass(frozen=True)
class Trial:
    """One layout: what was expected of it, and what it did. `failed`: why it did nothing."""

    estimate: Estimate
    seconds: float | None
    memory_gib: float | None
    failed: str = ""


@dataclass(frozen=True)
class Trials:
    """All of them, best expected first, and the numbers that they were expected and would now be expected with."""

    machine: Machine
    trials: tuple[Trial, ...]
    before: Calibration
    after: Calibration
    refitted: tuple[float, ...]  # seconds a step with `after`, of those that ran

    def lines(self) -> Iterator[str]:
        """For a terminal."""
        yield f"{'layout':<44} {'expected s':>10} {'measured s':>10} {'refitted s':>10} {'GiB':>6} {'seen':>6}"
        refitted = iter(self.refitted)
        for one in self.trials:
            cut = one.estimate.choice
            name = f"{cut.layout.describe()}; {cut.batching.size} x {cut.turns}, {cut.recompute}"
            if one.seconds is None:
                yield f"{name:<44} {one.estimate.step_s:>10.4f}  failed: {one.failed}"
                continue
            seen = f"{one.memory_gib:>6.2f}" if one.memory_gib is not None else f"{'-':>6}"
            yield (
                f"{name:<44} {one.estimate.step_s:>10.4f} {one.seconds:>10.4f} {next(refitted):>10.4f} "
                f"{one.estimate.memory_gib:>6.2f} {seen}"
            )
        for name, value in asdict(self.after).items():
            yield f"{name:<18} {getattr(self.before, name):.4g} -> {value:.4g}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rows = [
            {
                "layout": asdict(one.estimate.choice.layout),
                "micro_batch": one.estimate.choice.batching.size,
                "recompute": one.estimate.choice.recompute,
                "expected_s": one.estimate.step_s,
                "measured_s": one.seconds,
                "expected_gib": one.estimate.memory_gib,
                "measured_gib": one.memory_gib,
                "failed": one.failed,
            }
            for one in self.trials
        ]
        return {"layouts": rows, "before": asdict(self.before), "after": asdict(self.after)}


def measure(config: Config, count: int, steps: int, say: Callable[[str], None]) -> Trials:
    """Train the first `count` layouts that fit for so many steps each on the running cluster, on random tokens.

    The calibration that fits what was measured is kept for plans of such devices. Raises LayoutError where no legal
    layout fits, and ClusterError.
    """
    from raytrain_hpc.driver.cluster_probe import running_machine

    machine, config = running_machine(config), _alone(config)
    shape = resolve_shape(config.model, vocab_size=None, seq_len=config.train.seq_len)
    before, free = known_calibration(machine.device.name), free_keys(config, accelerated=True)
    best = [one for one in rank(config, shape, machine, before, free) if one.fits][:count]
    if not best:
        raise LayoutError("parallel", "auto", "", "nothing fits, so that there is nothing to measure; see plan")
    trials = [_tried(config, one, machine.devices, steps, say) for one in best]
    ran = [one for one in trials if one.seconds is not None]

    def predicted(calibration: Calibration) -> list[float]:
        model = CostModel(work_of(config, shape), machine, calibration)
        return [model.step(one.estimate.choice).total for one in ran]

    after = refit(predicted, [one.seconds for one in ran if one.seconds is not None], before)
    if ran:
        remember_calibration(machine.device.name, after)
    return Trials(machine, tuple(trials), before, after, tuple(predicted(after)))


def _alone(config: Config) -> Config:
    """The settings with random tokens, and nothing beside the steps."""
    other = copy(config)
    vocabulary = 256 if config.model.vocab_size == "auto" else config.model.vocab_size
    other.model = replace(config.model, vocab_size=vocabulary)
    other.data = replace(config.data, path="synthetic", sources=[])
    other.checkpoint = replace(config.checkpoint, every=0)
    other.observe = replace(config.observe, tensorboard=False, sample_tokens=0)
    return other


def _tried(config: Config, one: Estimate, world: int, steps: int, say: Callable[[str], None]) -> Trial:
    from raytrain_hpc.api import train

    with TemporaryDirectory(dir=_parent(config)) as name:
        chosen = settled(config, one.choice)
        chosen.run = replace(config.run, dir=str(Path(name) / "run"))
        chosen.train = replace(chosen.train, steps=steps + _WARMUP, eval_samples=1)
        chosen.cluster = replace(config.cluster, workers=world)
        say(f"{one.choice.layout.describe()}: {one.step_s:.4f} s a step expected")
        try:
            train(chosen, quiet=True)
        except RaytrainError as error:
            return Trial(one, None, None, " ".join(str(error).split())[:120])
        lines = [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
    return Trial(one, *_figures(lines))


def _parent(config: Config) -> str:
    """Where runs of these settings are written: every node sees it."""
    parent = Path(config.run.dir).expanduser().absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return str(parent)


def _figures(lines: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    counted = lines[_WARMUP:]
    peaks = [line["memory/peak_gib"] for line in counted if line.get("memory/peak_gib") is not None]
    return median(float(line["time/step_s"]) for line in counted), max(peaks, default=None)
