"""A drill: a seeded schedule of faults against a run, and what they cost."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from raytrain_hpc.api import train
from raytrain_hpc.cli.options import one_line_errors, split_words
from raytrain_hpc.config.schema import Config, FaultKind, InjectConfig
from raytrain_hpc.errors import CheckpointError, ConfigError

FAULT_KINDS: tuple[FaultKind, ...] = ("kill", "stop", "hang", "gil", "exception", "skip_collective", "nan")
INCIDENT_KINDS = {
    "kill": "died",
    "stop": "frozen",
    "hang": "stalled",
    "gil": "interpreter held",
    "exception": "raised",
    "skip_collective": "out of step",
    "nan": "not finite",
}
_MIN_STEPS_BETWEEN_FAULTS = 5  # steps between two faults, at least


@dataclass(frozen=True)
class InjectedFault:
    """A fault that came to pass: `incident` is what the run made of it, None where it made nothing of it."""

    fault: InjectConfig
    time: float  # unix time
    rank: int  # that it struck
    incident: dict[str, Any] | None

    @property
    def attributed_correctly(self) -> bool:
        """Whether the right rank was named, for what it did."""
        found = self.incident
        return found is not None and (found["kind"], found["rank"]) == (INCIDENT_KINDS[self.fault.kind], self.rank)


@dataclass(frozen=True)
class DrillReport:
    """What a drill cost. `goodput`: of the time from the first step to the last, what went into committed steps.

    `same`: whether losses, norms and the last state are those of a run without faults, bit for bit; None: not compared.
    """

    injected: tuple[InjectedFault, ...]
    num_planned: int
    steps: int
    steps_lost: int
    goodput: float
    bitwise_equal: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "planned": self.num_planned,
            "struck": len(self.injected),
            "named": sum(one.attributed_correctly for one in self.injected),
            "steps": self.steps,
            "steps_lost": self.steps_lost,
            "goodput": self.goodput,
            "same": self.bitwise_equal,
            "kinds": {
                kind: self._summarize_kind(kind)
                for kind in FAULT_KINDS
                if any(one.fault.kind == kind for one in self.injected)
            },
        }

    def format_text(self) -> str:
        """For a person."""
        plain = self.to_json()
        lines = [
            f"{plain['struck']} of {self.num_planned} faults struck in {self.steps} steps; {plain['named']} named right; "
            f"{self.steps_lost} steps lost; goodput {100 * self.goodput:.1f}% from the first step on"
        ]
        if self.bitwise_equal is not None:
            lines.append(
                f"  losses and last state {'are' if self.bitwise_equal else 'ARE NOT'} those of a run without faults"
            )
        for kind, found in plain["kinds"].items():
            lines.append(
                f"  {kind:16} {found['struck']:3}  detected {_format_seconds(found['detected_s'])}  "
                f"recovered {_format_seconds(found['recovered_s'])}"
            )
        return "\n".join(lines)

    def _summarize_kind(self, kind: str) -> dict[str, Any]:
        mine = [one for one in self.injected if one.fault.kind == kind]
        seen = [(one.incident["time"] - one.time, one.incident["recovered_s"]) for one in mine if one.incident]
        return {
            "struck": len(mine),
            "named": sum(one.attributed_correctly for one in mine),
            "detected_s": [max(0.0, detected) for detected, _ in seen],
            "recovered_s": [recovered for _, recovered in seen if recovered is not None],
        }


def make_schedule(seed: int, num_faults: int, steps: int, world_size: int) -> list[InjectConfig]:
    """Faults of all kinds on all ranks, one every so many steps. ConfigError where there are too few steps for them."""
    apart = steps // (num_faults + 1)
    if apart < _MIN_STEPS_BETWEEN_FAULTS:
        remedy = f"{num_faults} faults need at least {_MIN_STEPS_BETWEEN_FAULTS * (num_faults + 1)} steps; raise it, or use fewer faults"
        raise ConfigError("train.steps", steps, "drill", remedy)
    chance = random.Random(seed)
    return [
        InjectConfig(
            chance.choice(FAULT_KINDS),
            chance.randrange(world_size),
            apart * (number + 1) + chance.randrange(apart // 2),
        )
        for number in range(num_faults)
    ]


def run_drill(
    config: Config, *, seed: int, num_faults: int, world_size: int, compare: bool = False, quiet: bool = False
) -> DrillReport:
    """Run `config` on `world` workers with a schedule of faults. Its run directory must be a fresh one.

    `compare`: with a run of the same settings without faults, in the directory beside it, that ends in "-undisturbed".
    """
    spoilt = deepcopy(config)
    spoilt.cluster.workers = world_size
    spoilt.fault.inject = make_schedule(seed, num_faults, config.train.steps, world_size)
    spoilt.fault.max_failures = max(config.fault.max_failures, num_faults)
    directory = Path(config.run.dir)
    if (directory / "metrics.jsonl").exists():
        raise ConfigError("run.dir", config.run.dir, config.origin("run.dir"), "holds a run; a drill begins a new one")
    train(spoilt, quiet=quiet)
    found = build_report(spoilt.fault.inject, directory)
    if not compare:
        return found
    undisturbed = deepcopy(config)
    undisturbed.cluster.workers = world_size
    undisturbed.run.dir = f"{config.run.dir}-undisturbed"
    train(undisturbed, quiet=quiet)
    return replace(found, bitwise_equal=fingerprint(directory) == fingerprint(Path(undisturbed.run.dir)))


def fingerprint(run_dir: Path) -> str:
    """Of every step's loss and gradient norm, and of every bit of the newest checkpoint's tensors.

    Raises CheckpointError where there is no valid one.
    """
    from raytrain_hpc.checkpoint.shard_io import read_state
    from raytrain_hpc.checkpoint.store import CheckpointStore
    from raytrain_hpc.state.host_buffer import HostBuffer
    from raytrain_hpc.state.shard_index import Box, StateIndex
    from raytrain_hpc.state.sharded_state import compute_digest

    last = {line["step"]: line for line in _read_jsonl(run_dir / "metrics.jsonl")}
    curve = [(step, last[step]["train/loss"], last[step]["train/grad_norm"]) for step in sorted(last)]
    checkpoint = CheckpointStore(run_dir / "checkpoints").find_newest_valid(lambda path, reason: None)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint to compare")
    whole = StateIndex(replace(one, boxes=(Box.from_shape(one.shape),)) for one in checkpoint.index.values())
    holding = HostBuffer().reserve(whole)
    read_state(checkpoint, holding)
    return hashlib.sha256(repr((curve, compute_digest(holding))).encode()).hexdigest()[:16]


def build_report(faults: Sequence[InjectConfig], run_dir: Path) -> DrillReport:
    """What a finished run's directory says of these faults."""
    incidents, metrics = _read_jsonl(run_dir / "incidents.jsonl"), _read_jsonl(run_dir / "metrics.jsonl")
    marks = {number: run_dir / "injected" / str(number) for number in range(len(faults))}
    times = sorted((mark.stat().st_mtime, number) for number, mark in marks.items() if mark.exists())
    struck = []
    for place, (at, number) in enumerate(times):
        until = times[place + 1][0] if place + 1 < len(times) else float("inf")
        mine = [one for one in incidents if at - 0.05 <= one["time"] < until]
        rank = json.loads(marks[number].read_text())["rank"]
        struck.append(InjectedFault(faults[number], at, rank, mine[0] if mine else None))
    last = {line["step"]: line for line in metrics}
    passed = metrics[-1]["time/unix"] - metrics[0]["time/unix"]
    spent = sum(line["time/step_s"] for step, line in last.items() if step > 1)
    lost = sum(one["steps_lost"] or 0 for one in incidents)
    return DrillReport(tuple(struck), len(faults), len(last), lost, spent / passed if passed else 1.0)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _format_seconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s (at most {max(seconds):.2f})" if seconds else "-"


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--seed", default=0, show_default=True, help="Of the schedule.")
@click.option("--faults", default=5, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--workers", default=3, show_default=True, type=click.IntRange(min=2), help="Ranks they strike.")
@click.option("--compare", is_flag=True, help="With a run without faults, every bit (train.deterministic=elastic).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@one_line_errors
def drill(words: tuple[str, ...], seed: int, faults: int, workers: int, compare: bool, as_json: bool) -> None:
    """Train with faults on purpose, and show what they cost: killed, frozen, hung, out of step, exceptions, NaN."""
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    config = load_config(path, overrides)
    found = run_drill(config, seed=seed, num_faults=faults, world_size=workers, compare=compare, quiet=as_json)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.format_text())
