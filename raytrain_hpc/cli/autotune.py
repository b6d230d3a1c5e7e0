"""`raytrain-hpc plan --measure`: train the best planned layouts on the running cluster and refit the calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, gettempdir
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
from raytrain_hpc.storage.location import is_url

_WARMUP_STEPS = 2  # not measured


@dataclass(frozen=True)
class Trial:
    """A layout with its estimate and its measurement. `error`: why it could not be trained; empty if it was."""

    estimate: Estimate
    step_s: float | None
    memory_gib: float | None
    error: str = ""


@dataclass(frozen=True)
class AutotuneResult:
    """All trials, ordered by expected step time, and the calibration before and after fitting it to them."""

    machine: Machine
    trials: tuple[Trial, ...]
    old_calibration: Calibration
    new_calibration: Calibration
    refitted_step_s: tuple[float, ...]  # with `new_calibration`, of the trials that ran

    @property
    def has_measurement(self) -> bool:
        """Whether at least one layout could be trained."""
        return any(trial.step_s is not None for trial in self.trials)

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of a table for the terminal."""
        yield f"{'layout':<44} {'expected s':>10} {'measured s':>10} {'refitted s':>10} {'GiB':>6} {'peak':>6}"
        refitted = iter(self.refitted_step_s)
        for trial in self.trials:
            choice = trial.estimate.choice
            name = (
                f"{choice.layout.describe()}; {choice.batching.size} x {choice.microbatches_per_rank}, "
                f"{choice.describe_recompute()}"
            )
            if trial.step_s is None:
                yield f"{name:<44} {trial.estimate.step_s:>10.4f}  failed: {trial.error}"
                continue
            measured_gib = f"{trial.memory_gib:>6.2f}" if trial.memory_gib is not None else f"{'-':>6}"
            yield (
                f"{name:<44} {trial.estimate.step_s:>10.4f} {trial.step_s:>10.4f} {next(refitted):>10.4f} "
                f"{trial.estimate.memory_gib:>6.2f} {measured_gib}"
            )
        for name, value in asdict(self.new_calibration).items():
            yield f"{name:<18} {getattr(self.old_calibration, name):.4g} -> {value:.4g}"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        rows = [
            {
                "layout": asdict(trial.estimate.choice.layout),
                "micro_batch_size": trial.estimate.choice.batching.size,
                "activation_checkpointing": trial.estimate.choice.recompute,
                "recompute_layers": trial.estimate.choice.recompute_layers,
                "expected_s": trial.estimate.step_s,
                "measured_s": trial.step_s,
                "expected_gib": trial.estimate.memory_gib,
                "measured_gib": trial.memory_gib,
                "failed": trial.error,
            }
            for trial in self.trials
        ]
        return {"layouts": rows, "before": asdict(self.old_calibration), "after": asdict(self.new_calibration)}


def measure_layouts(config: Config, num_layouts: int, steps: int, log: Callable[[str], None]) -> AutotuneResult:
    """Train the best `num_layouts` layouts that fit, `steps` measured steps each, on the running cluster.

    Training data are random tokens. The refitted calibration is saved and used by later plans for the same device.

    Raises:
        LayoutError: No legal layout fits into memory.
        ClusterError: The workers cannot be started.
    """
    from raytrain_hpc.driver.cluster_probe import inspect_running_cluster

    machine, config = inspect_running_cluster(config), _make_minimal_config(config)
    model_spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    old_calibration, space = load_calibration(machine.device.name), build_search_space(config, has_accelerator=True)
    best = [
        estimate for estimate in rank_layouts(config, model_spec, machine, old_calibration, space) if estimate.fits
    ][:num_layouts]
    if not best:
        raise LayoutError("parallel", "auto", "", "no layout fits into memory; run raytrain-hpc plan for remedies")
    trials = [_run_trial(config, estimate, machine.num_devices, steps, log) for estimate in best]
    measured = [trial for trial in trials if trial.step_s is not None]

    def predict(calibration: Calibration) -> list[float]:
        model = CostModel(make_workload(config, model_spec), machine, calibration)
        return [model.estimate_step(trial.estimate.choice).total for trial in measured]

    new_calibration = refit(predict, [trial.step_s for trial in measured if trial.step_s is not None], old_calibration)
    if measured:
        save_calibration(machine.device.name, new_calibration)
    return AutotuneResult(machine, tuple(trials), old_calibration, new_calibration, tuple(predict(new_calibration)))


def _make_minimal_config(config: Config) -> Config:
    """Return a copy of the config with random tokens, and without all that would outlast a trial or disturb it.

    That is checkpoints, samples, trackers, callbacks, injected faults and profiles.
    """
    minimal = copy(config)
    vocabulary = 256 if config.model.vocab_size == "auto" else config.model.vocab_size
    minimal.model = replace(config.model, vocab_size=vocabulary)
    minimal.data = replace(config.data, path="synthetic", sources=[], stages=[])
    minimal.train = replace(config.train, callbacks=[])
    minimal.checkpoint = replace(config.checkpoint, interval=0, local_dir="", upload_interval="auto")
    minimal.fault = replace(config.fault, inject=[])
    minimal.profiler = replace(config.profiler, name="none")
    trackers: dict[str, Any] = {"tensorboard": False, "ray_metrics": False, "wandb_project": "", "mlflow_uri": ""}
    minimal.logging = replace(config.logging, **trackers, trackers=[], sample_tokens=0, prompts=[])
    return minimal


def _run_trial(config: Config, estimate: Estimate, world_size: int, steps: int, log: Callable[[str], None]) -> Trial:
    from raytrain_hpc.api import train

    with TemporaryDirectory(dir=_make_runs_dir(config)) as directory:
        trial_config = apply_choice(config, estimate.choice)
        trial_config.run = replace(config.run, dir=str(Path(directory) / "run"))
        trial_config.train = replace(trial_config.train, steps=steps + _WARMUP_STEPS)
        warmup_steps = min(config.lr_scheduler.warmup_steps, trial_config.train.steps)
        trial_config.lr_scheduler = replace(config.lr_scheduler, warmup_steps=warmup_steps)
        trial_config.eval = replace(config.eval, samples=1)
        trial_config.cluster = replace(config.cluster, workers=world_size)
        log(f"{estimate.choice.layout.describe()}: {estimate.step_s:.4f} s per step expected")
        try:
            train(trial_config, quiet=True)
        except RaytrainError as error:
            return Trial(estimate, None, None, " ".join(str(error).split())[:120])
        records = [json.loads(line) for line in (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()]
    return Trial(estimate, *_summarize_metrics(records))


def _make_runs_dir(config: Config) -> str:
    """Create and return the parent directory of run.dir, which all nodes can see; a local one if it is a URL."""
    if is_url(config.run.dir):
        return gettempdir()
    parent = Path(config.run.dir).expanduser().absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    return str(parent)


def _summarize_metrics(records: Sequence[dict[str, Any]]) -> tuple[float, float | None]:
    measured = records[_WARMUP_STEPS:]
    peaks = [record["memory/peak_gib"] for record in measured if record.get("memory/peak_gib") is not None]
    return median(float(record["time/step_s"]) for record in measured), max(peaks, default=None)
