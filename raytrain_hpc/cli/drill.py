"""`raytrain-hpc drill`: inject a seeded schedule of faults into a run and measure what they cost."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import click

from raytrain_hpc.api import train
from raytrain_hpc.cli.options import CONFIG_WORDS, ConfigCommand, print_errors_on_one_line, split_words
from raytrain_hpc.config.schema import Config, FaultKind, InjectConfig
from raytrain_hpc.device_backends import has_endless_kernel, is_accelerator_type
from raytrain_hpc.driver.run_directory import read_run_directory
from raytrain_hpc.elastic.audit_verdict import CORRUPT, FAULTY_DEVICE
from raytrain_hpc.errors import CheckpointError, ConfigError
from raytrain_hpc.storage.location import get_modified_time

FAULT_KINDS: tuple[FaultKind, ...] = (
    "kill",
    "stop",
    "hang",
    "gil",
    "exception",
    "segfault",
    "oom",
    "skip_collective",
    "resize_collective",
    "network_down",
    "nan",
)
GPU_FAULT_KINDS: tuple[FaultKind, ...] = ("gpu_hang", "gpu_error")  # with cluster.device naming one
CORRUPTION_KINDS: tuple[FaultKind, ...] = tuple(kind for kind in get_args(FaultKind) if kind.startswith("bitflip_"))
_ROUNDED_KINDS = ("bitflip_activation", "bitflip_gradient")  # of which low bits are often rounded away
# Kinds of incident that name each fault. gloo ends a process that receives more than it has room for.
INCIDENT_KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("died",),
    "stop": ("frozen",),
    "hang": ("stalled",),
    "gil": ("interpreter held",),
    "exception": ("raised",),
    "segfault": ("crashed",),
    "oom": ("out of memory",),
    "skip_collective": ("out of step", "crashed"),
    "resize_collective": ("out of step", "crashed"),
    "network_down": ("link down",),
    "gpu_hang": ("stalled",),
    "gpu_error": ("raised",),
    "nan": ("not finite",),
    **dict.fromkeys(CORRUPTION_KINDS, ("silent corruption", FAULTY_DEVICE)),
    **dict.fromkeys(("bitflip_weight", "bitflip_moment"), (CORRUPT,)),
}
_MIN_BIT = 16  # of a flip in fp32 that is not to be rounded away
_MIN_STEPS_BETWEEN_FAULTS = 5


@dataclass(frozen=True)
class InjectedFault:
    """A fault that was injected, and the incident that the run recorded for it; None if it recorded none."""

    fault: InjectConfig
    time: float  # unix time
    rank: int  # rank that got the fault
    incident: dict[str, Any] | None

    @property
    def attributed_correctly(self) -> bool:
        """Whether the incident names the right rank and the right kind of fault."""
        incident = self.incident
        if incident is None:
            return False
        # With the network of a node, all its ranks are cut off.
        ranks = incident["ranks"] if incident["kind"] == "link down" else [incident["rank"]]
        return self.rank in ranks and incident["kind"] in INCIDENT_KINDS[self.fault.kind]


@dataclass(frozen=True)
class DrillReport:
    """Result of a drill. `goodput`: share of the time from the first step to the last that went into committed steps.

    `bitwise_equal`: whether losses, gradient norms and the final state equal those of a run without faults, bit for
    bit; None: not compared.
    """

    injected: tuple[InjectedFault, ...]
    num_planned: int
    steps: int
    steps_lost: int
    goodput: float
    bitwise_equal: bool | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "planned": self.num_planned,
            "injected": len(self.injected),
            "attributed_correctly": sum(fault.attributed_correctly for fault in self.injected),
            "steps": self.steps,
            "steps_lost": self.steps_lost,
            "goodput": self.goodput,
            "bitwise_equal": self.bitwise_equal,
            "kinds": {
                kind: self._summarize_kind(kind)
                for kind in FAULT_KINDS + GPU_FAULT_KINDS + CORRUPTION_KINDS
                if any(fault.fault.kind == kind for fault in self.injected)
            },
        }

    def format_text(self) -> str:
        """Format the report for the terminal."""
        summary = self.to_json()
        lines = [
            f"{summary['injected']} of {self.num_planned} faults injected in {self.steps} steps, "
            f"{summary['attributed_correctly']} attributed correctly; {self.steps_lost} steps lost; "
            f"goodput {100 * self.goodput:.1f}% from the first step"
        ]
        if self.bitwise_equal is not None:
            lines.append(
                f"  losses and final state {'equal' if self.bitwise_equal else 'DIFFER FROM'} a run without faults"
            )
        for kind, costs in summary["kinds"].items():
            lines.append(
                f"  {kind:18} {costs['injected']:3}  detected {_format_seconds(costs['detected_s'])}  "
                f"recovered {_format_seconds(costs['recovered_s'])}"
            )
        return "\n".join(lines)

    def _summarize_kind(self, kind: str) -> dict[str, Any]:
        faults = [fault for fault in self.injected if fault.fault.kind == kind]
        delays = [
            (fault.incident["time"] - fault.time, fault.incident["recovered_s"]) for fault in faults if fault.incident
        ]
        return {
            "injected": len(faults),
            "attributed_correctly": sum(fault.attributed_correctly for fault in faults),
            "detected_s": [max(0.0, detected_s) for detected_s, _ in delays],
            "recovered_s": [recovered_s for _, recovered_s in delays if recovered_s is not None],
        }


def make_schedule(
    seed: int, num_faults: int, steps: int, world_size: int, kinds: Sequence[FaultKind] = FAULT_KINDS
) -> list[InjectConfig]:
    """Return `num_faults` faults of random kinds on random ranks, spread evenly over the steps.

    Bit flips have a random bit, but those of a batch, whose tokens must stay in the vocabulary. One in four is
    persistent.

    Raises:
        ConfigError: There are too few steps for this number of faults.
    """
    interval = steps // (num_faults + 1)
    if interval < _MIN_STEPS_BETWEEN_FAULTS:
        remedy = (
            f"{num_faults} faults need at least {_MIN_STEPS_BETWEEN_FAULTS * (num_faults + 1)} steps; "
            "raise train.steps, or use fewer faults"
        )
        raise ConfigError("train.steps", steps, "drill", remedy)
    rng = random.Random(seed)
    schedule = [
        InjectConfig(
            rng.choice(kinds),
            rng.randrange(world_size),
            interval * (number + 1) + rng.randrange(interval // 2),
        )
        for number in range(num_faults)
    ]
    for fault in schedule:
        if fault.kind in CORRUPTION_KINDS:
            lowest = _MIN_BIT if fault.kind in _ROUNDED_KINDS else 0
            fault.bit = 0 if fault.kind == "bitflip_batch" else rng.randrange(lowest, 32)
            fault.persistent = rng.random() < 0.25
    return schedule


def prepare_for_corruption(config: Config, world_size: int) -> Config:
    """Return a copy of the config that audits every step, with one microbatch per rank if the batch allows it."""
    audited, batch_size = deepcopy(config), config.train.global_batch_size
    audited.train.deterministic, audited.fault.keep_verified_state = "elastic", True
    audited.cluster.min_workers = world_size  # of two ranks that are left, none can say which is wrong
    audited.fault.audit_interval = config.fault.audit_interval or 1
    if batch_size % world_size == 0:
        audited.train.micro_batch_size = batch_size // world_size
    return audited


def run_drill(
    config: Config,
    *,
    seed: int,
    num_faults: int,
    world_size: int,
    compare: bool = False,
    corruption: bool = False,
    quiet: bool = False,
) -> DrillReport:
    """Train `config` on `world_size` workers with a schedule of injected faults, in a new run directory.

    `compare`: train the same config without faults, in a directory with the suffix "-undisturbed", and compare.
    `corruption`: flip bits in audited steps, instead of other faults; see `prepare_for_corruption`.

    Raises:
        ConfigError: The run directory holds a run already, or there are too few steps for this number of faults.
    """
    config = prepare_for_corruption(config, world_size) if corruption else config
    faulty = deepcopy(config)
    faulty.cluster.workers = world_size
    kinds = CORRUPTION_KINDS if corruption else list_kinds(config.cluster.device, world_size)
    faulty.fault.inject = make_schedule(seed, num_faults, config.train.steps, world_size, kinds)
    faulty.fault.max_failures = max(config.fault.max_failures, num_faults)
    if read_run_directory(config.run.dir).metrics.exists():
        raise ConfigError("run.dir", config.run.dir, config.origin("run.dir"), "holds a run; choose another run.dir")
    train(faulty, quiet=quiet)
    result = build_report(faulty.fault.inject, config.run.dir)
    if not compare:
        return result
    reference = deepcopy(config)
    reference.cluster.workers = world_size
    reference.run.dir = f"{config.run.dir}-undisturbed"
    train(reference, quiet=quiet)
    return replace(result, bitwise_equal=fingerprint(config.run.dir) == fingerprint(reference.run.dir))


def list_kinds(device: str, world_size: int) -> tuple[FaultKind, ...]:
    """Return the kinds of faults that a run can have. `device`: cluster.device."""
    kinds = set(FAULT_KINDS + GPU_FAULT_KINDS)
    if not is_accelerator_type(device):
        kinds -= set(GPU_FAULT_KINDS)
    elif not has_endless_kernel(device):
        kinds -= {"gpu_hang"}
    if device != "cpu" or world_size < 3:  # of two ranks that do not hear each other, either can be cut off
        kinds -= {"network_down"}
    return tuple(kind for kind in FAULT_KINDS + GPU_FAULT_KINDS if kind in kinds)


def fingerprint(run_dir: str | Path) -> str:
    """Hash the loss and gradient norm of every step and all tensors of the newest checkpoint.

    Raises:
        CheckpointError: The run has no valid checkpoint.
    """
    from raytrain_hpc.checkpoint.shard_io import read_state
    from raytrain_hpc.checkpoint.store import CheckpointStore
    from raytrain_hpc.state.host_buffer import HostBuffer
    from raytrain_hpc.state.shard_index import Box, StateIndex
    from raytrain_hpc.state.sharded_state import compute_digest

    directory = read_run_directory(run_dir)
    last = {line["step"]: line for line in directory.read_metrics()}
    curve = [(step, last[step]["train/loss"], last[step]["train/grad_norm"]) for step in sorted(last)]
    checkpoint = CheckpointStore(directory.checkpoints).find_newest_valid(lambda path, reason: None)
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint to compare")
    index = StateIndex(replace(entry, boxes=(Box.from_shape(entry.shape),)) for entry in checkpoint.index.values())
    state = HostBuffer().reserve(index)
    read_state(checkpoint, state)
    return hashlib.sha256(repr((curve, compute_digest(state))).encode()).hexdigest()[:16]


def build_report(faults: Sequence[InjectConfig], run_dir: str | Path) -> DrillReport:
    """Match the faults with the incidents that a finished run recorded in its directory."""
    directory = read_run_directory(run_dir)
    incidents = directory.read_incidents()
    metrics = list(directory.read_metrics())
    markers = {number: directory.location / "injected" / str(number) for number in range(len(faults))}
    times = sorted((get_modified_time(marker), number) for number, marker in markers.items() if marker.is_file())
    injected = []
    for position, (injected_at, number) in enumerate(times):
        next_injected_at = times[position + 1][0] if position + 1 < len(times) else float("inf")
        matching = [incident for incident in incidents if injected_at - 0.05 <= incident["time"] < next_injected_at]
        rank = json.loads(markers[number].read_bytes())["rank"]
        injected.append(InjectedFault(faults[number], injected_at, rank, matching[0] if matching else None))
    last = {line["step"]: line for line in metrics}
    elapsed = metrics[-1]["time/unix"] - metrics[0]["time/unix"]
    committed = sum(line["time/step_s"] for step, line in last.items() if step > 1)
    steps_lost = sum(incident["steps_lost"] or 0 for incident in incidents)
    return DrillReport(tuple(injected), len(faults), len(last), steps_lost, committed / elapsed if elapsed else 1.0)


def _format_seconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} s (at most {max(seconds):.2f})" if seconds else "-"


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option("--seed", default=0, show_default=True, help="Seed of the fault schedule.")
@click.option("--faults", default=5, show_default=True, type=click.IntRange(min=1), help="Number of faults.")
@click.option("--workers", default=3, show_default=True, type=click.IntRange(min=2), help="Number of workers.")
@click.option(
    "--compare", is_flag=True, help="Compare bit by bit with a run without faults (train.deterministic=elastic)."
)
@click.option("--corruption", is_flag=True, help="Flip bits, and audit every step; instead of other faults.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@print_errors_on_one_line
def drill(
    words: tuple[str, ...], seed: int, faults: int, workers: int, compare: bool, corruption: bool, as_json: bool
) -> None:
    """Train with injected faults and report their cost.

    Killed, frozen, hung, crashed, cut off and out-of-step ranks, exceptions, memory that runs out, NaN; with a GPU in
    cluster.device also kernels that never end or fail.
    """
    from raytrain_hpc.config.loader import load_command_line

    path, overrides = split_words(words)
    config = load_command_line(path, overrides)
    result = run_drill(
        config,
        seed=seed,
        num_faults=faults,
        world_size=workers,
        compare=compare,
        corruption=corruption,
        quiet=as_json,
    )
    click.echo(json.dumps(result.to_json(), indent=2) if as_json else result.format_text())
