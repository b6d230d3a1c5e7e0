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

from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import LayoutError, RaytrainError
from raytrain_hpc.planner.calibration import Calibration, refit
from raytrain_hpc.planner.cost_model import CostModel
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.measured_links import load_calibration, save_calibration
from raytrain_hpc.planner.search import Estimate, rank_layouts
from raytrain_hpc.planner.search_space import apply_choice, build_search_space
from raytrain_hpc.planner.workload import make_workload

_WARMUP_STEPS = 2  # steps that do not count


@dataclass(frozen=True)
class Trial:
    """One layout: what was expected of it, and what it did. `failed`: why it did nothing."""

    estimate: Estimate
    step_s: float | None
    memory_gib: float | None
    error: str = ""


@dataclass(frozen=True)
class AutotuneResult:
    """All of them, best expected first, and the numbers that they were expected and would now be expected with."""

    machine: Machine
    trials: tuple[Trial, ...]
    old_calibration: Calibration
    new_calibration: Calibration
    refitted_step_s: tuple[float, ...]  # seconds a step with `after`, of those that ran

    def format_lines(self) -> Iterator[str]:
        """For a terminal."""
        yield f"{'layout':<44} {'expected s':>10} {'measured s':>10} {'refitted s':>10} {'GiB':>6} {'seen':>6}"
        refitted = iter(self.refitted_step_s)
        for one in self.trials:
            cut = one.estimate.choice
            name = f"{cut.layout.describe()}; {cut.batching.size} x {cut.microbatches_per_rank}, {cut.recompute}"
            if one.step_s is None:
                yield f"{name:<44} {one.estimate.step_s:>10.4f}  failed: {one.error}"
                continue
            seen = f"{one.memory_gib:>6.2f}" if one.memory_gib is not None else f"{'-':>6}"
            yield (
                f"{name:<44} {one.estimate.step_s:>10.4f} {one.step_s:>10.4f} {next(refitted):>10.4f} "
                f"{one.estimate.memory_gib:>6.2f} {seen}"
            )
        for name, value in asdict(self.new_calibration).items():
            yield f"{name:<18} {getattr(self.old_calibration, name):.4g} -> {value:.4g}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        rows = [
            {
                "layout": asdict(one.estimate.choice.layout),
                "micro_batch": one.estimate.choice.batching.size,
                "recompute": one.estimate.choice.recompute,
                "expected_s": one.estimate.step_s,
                "measured_s": one.step_s,
                "expected_gib": one.estimate.memory_gib,
                "measured_gib": one.memory_gib,
                "failed": one.error,
            }
            for one in self.trials
        ]
        return {"layouts": rows, "before": asdict(self.old_calibration), "after": asdict(self.new_calibration)}


def measure_layouts(config: Config, num_layouts: int, steps: int, log: Callable[[str], None]) -> AutotuneResult:
    """Train the first `count` layouts that fit for so many steps each on the running cluster, on random tokens.

    The calibration that fits what was measured is kept for plans of such devices. Raises LayoutError where no legal
    layout fits, and ClusterError.
    """
    from raytrain_hpc.driver.cluster_probe import inspect_running_cluster

    machine, config = inspect_running_cluster(config), _minimal_config(config)
    shape = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    before, free = load_calibration(machine.device.name), build_search_space(config, has_accelerator=True)
    best = [one for one in rank_layouts(config, shape, machine, before, free) if one.fits][:num_layouts]
    if not best:
        raise LayoutError("parallel", "auto", "", "nothing fits, so that there is nothing to measure; see plan")
    trials = [_run_trial(config, one, machine.num_devices, steps, log) for one in best]
    ran = [one for one in trials if one.step_s is not None]

    def predicted(calibration: Calibration) -> list[float]:
        model = CostModel(make_workload(config, shape), machine, calibration)
        return [model.estimate_step(one.estimate.choice).total for one in ran]

    after = refit(predicted, [one.step_s for one in ran if one.step_s is not None], before)
    if ran:
        save_calibration(machine.device.name, after)
    return AutotuneResult(machine, tuple(trials), before, after, tuple(predicted(after)))


def _minimal_config(config: Config) -> Config:
    """The settings with random tokens, and nothing beside the steps."""
    other = copy(config)
    vocabulary = 256 if config.model.vocab_size == "auto" else config.model.vocab_size
    other.model = replace(config.model, vocab_size=vocabulary)
    other.data = replace(config.data, path="synthetic", sources=[])
    other.checkpoint = replace(config.checkpoint, every=0)
    other.observe = replace(config.observe, tensorboard=False, sample_tokens=0)
    return other


def _run_trial(config: Config, estimate: Estimate, world_size: int, steps: int, log: Callable[[str], None]) -> Trial:
    from raytrain_hpc.api import train

    with TemporaryDirectory(dir=_make_runs_dir(config)) as name:
        chosen = apply_choice(config, estimate.choice)
        chosen.run = replace(config.run, dir=str(Path(name) / "run"))
        chosen.train = replace(chosen.train, steps=steps + _WARMUP_STEPS, eval_samples=1)
        chosen.cluster = replace(config.cluster, workers=world_size)
        log(f"{estimate.choice.layout.describe()}: {estimate.step_s:.4f} s a step expected")
        try:
            train(chosen, quiet=True)
        except RaytrainError as error:
            return Trial(estimate, None, None, " ".join(str(error).split())[:120])
        lines = [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
    return Trial(estimate, *_summarize_metrics(lines))


def _make_runs_dir(config: Config) -> str:
    """Where runs of these settings are written: every node sees it."""
    parent = Path(config.run.dir).expanduser().absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return str(parent)


def _summarize_metrics(records: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    counted = records[_WARMUP_STEPS:]
    peaks = [line["memory/peak_gib"] for line in counted if line.get("memory/peak_gib") is not None]
    return median(float(line["time/step_s"]) for line in counted), max(peaks, default=None)
