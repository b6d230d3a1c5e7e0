"""`bench step`: steady training speed and memory, beside a plain PyTorch loop of the same model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from raytrain_hpc.bench.arms import run_plain, run_platform, say, scratch
from raytrain_hpc.bench.cases import MEDIUM, SMALL, plain_job, settings
from raytrain_hpc.bench.ray_idle import idle_ray
from raytrain_hpc.bench.table import Table

MEMORY_GOAL_MIB = 120.0


@dataclass(frozen=True)
class Case:
    """One row: what is trained, on how many workers, and the share of the plain loop's speed that is the goal."""

    name: str
    words: tuple[str, ...]
    workers: int
    goal: float
    steps: int
    warmup: int


CASES = (
    Case("25M", MEDIUM, 1, 0.98, steps=16, warmup=3),
    Case("25M", MEDIUM, 2, 0.98, steps=20, warmup=3),
    Case("quickstart", SMALL, 1, 0.95, steps=40, warmup=5),
    Case("quickstart", SMALL, 2, 0.95, steps=50, warmup=5),
)


@dataclass(frozen=True)
class Arm:
    """What one run of one arm gave."""

    tokens_per_s: float
    peak_mib: float


def run(rounds: int) -> Table:
    """Alternate the two arms `rounds` times for each case, beside an idle Ray."""
    table = Table(
        "bench step: the platform beside a plain PyTorch loop",
        ("model", "workers", "plain tok/s", "platform tok/s", "ratio", "ratio each round", "goal", "met")
        + ("plain MiB", "platform MiB", "extra MiB", "goal MiB", "memory met"),
    )
    with idle_ray(cpus=4) as address:
        for case in CASES:
            _measure(case, rounds, address, table)
    table.notes += [
        "tok/s: from the median time between the ends of two steps in a row, all that happens between steps "
        "included; the first steps and the last are left out; medians over the rounds",
        "plain: one Python process, or DDP under torchrun; AdamW(fused=True), clip_grad_norm_, the same weights, "
        "tokens, microbatches and number of threads (1); platform: `raytrain-hpc train` with TensorBoard on",
        "both arms ran in turn beside the same Ray, which was idle in the plain arm",
        "MiB: peak resident memory of rank 0's process, before the checkpoint that ends a run",
    ]
    return table


def _measure(case: Case, rounds: int, address: str, table: Table) -> None:
    pairs = []
    for _ in range(rounds):
        pairs.append((_plain(case), _platform(case, address)))
        say(f"{case.name}, {case.workers} workers: {pairs[-1]}")
    plain, platform = ([pair[i] for pair in pairs] for i in (0, 1))
    ratios = [ours.tokens_per_s / theirs.tokens_per_s for theirs, ours in pairs]
    extra = median(ours.peak_mib - theirs.peak_mib for theirs, ours in pairs)
    table.add(
        case.name,
        case.workers,
        median(arm.tokens_per_s for arm in plain),
        median(arm.tokens_per_s for arm in platform),
        median(ratios),
        ratios,
        case.goal,
        median(ratios) >= case.goal,
        median(arm.peak_mib for arm in plain),
        median(arm.peak_mib for arm in platform),
        extra,
        MEMORY_GOAL_MIB,
        extra <= MEMORY_GOAL_MIB,
    )


def _plain(case: Case) -> Arm:
    _, config = settings(case.words, case.workers, case.steps)
    with scratch() as directory:
        report = run_plain(plain_job(config, case.workers, directory), case.workers)
    return Arm(_rate(report.unix, case), report.peak_mib)


def _platform(case: Case, address: str) -> Arm:
    words, _ = settings(case.words, case.workers, case.steps)
    ran = run_platform([*words, f"cluster.address={address}"])
    return Arm(_rate(ran.unix, case), ran.metrics[-1]["memory/peak_gib"] * 2**10)


def _rate(unix: Sequence[float], case: Case) -> float:
    """Tokens a second, from the median time of a step. The last step is left out: evaluation and saving follow it."""
    _, config = settings(case.words, case.workers, case.steps)
    seconds = [after - before for before, after in pairwise(unix[case.warmup : -1])]
    return config.train.global_batch * config.train.seq_len / median(seconds)
