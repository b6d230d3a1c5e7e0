"""`bench step`: steady training speed and memory, compared with a plain PyTorch loop of the same model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from raytrain_hpc.bench.contenders import launch_platform, launch_torch_baseline, log_progress
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.interleave import alternate
from raytrain_hpc.bench.nanogpt_baseline import OVERRIDES, launch_nanogpt
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import MEDIUM, SMALL, make_settings

MEMORY_GOAL_MIB = 120.0
PAIRS_PER_ROUND = 8
WARMUP_STEPS = 4
NANOGPT_GOAL = 1.05
STEPS = 1_000_000  # never reached: the runs are killed after the last turn


@dataclass(frozen=True)
class Case:
    """A model and a number of workers. `goal`: minimum ratio of the platform's speed to the plain loop's."""

    name: str
    overrides: tuple[str, ...]
    workers: int
    goal: float


# A quarter of the medium workload's tokens per step, so that several steps fit into a turn. The overhead per step
# weighs more then.
MEDIUM_SHORT = (*MEDIUM, "train.seq_len=128", "train.global_batch_size=2", "train.micro_batch_size=1")
CASES = (
    Case("25M", MEDIUM_SHORT, 1, 0.98),
    Case("25M", MEDIUM_SHORT, 2, 0.98),
    Case("quickstart", SMALL, 1, 0.95),
    Case("quickstart", SMALL, 2, 0.95),
)


def run(rounds: int, against: Mapping[str, Path] | None = None) -> Table:
    """Alternate the platform and the plain loop, `rounds` times eight turns each for every case.

    `against`: clones of other trainers by name (nanogpt), which are compared too.
    """
    table = Table(
        "bench step: the platform compared with a plain PyTorch loop",
        ("model", "workers", "plain tok/s", "platform tok/s", "ratio", "middle half", "turns", "goal", "met")
        + ("plain MiB", "platform MiB", "extra MiB", "goal MiB", "memory met"),
    )
    with idle_ray(cpus=4) as address:
        for case in CASES:
            _measure(case, rounds, address, table)
    if against is not None and "nanogpt" in against:
        _measure_nanogpt(against["nanogpt"], rounds, table)
    table.notes += [
        "both runs are started and alternate in turns of a few steps, the other one stopped by SIGSTOP; ratio: median "
        "over pairs of consecutive turns, each by the median time from the end of a step to the end of the next; "
        "middle half: the quartiles of these ratios; tok/s: medians over the turns",
        "plain: one Python process, or DDP under torchrun; AdamW(fused=True), clip_grad_norm_, the same weights, "
        "tokens, microbatches and number of threads (1); platform: `raytrain-hpc train` with TensorBoard on",
        "the Ray cluster of the platform's workers is also up, but idle, during the plain loop's turns",
        "MiB: peak resident memory of rank 0's process",
    ]
    return table


def _measure_nanogpt(clone: Path, rounds: int, table: Table) -> None:
    """Compare with nanoGPT's own loop at its recipe for CPUs. Its memory is not compared: it has another process."""
    words = [*OVERRIDES, f"train.steps={STEPS}"]
    with launch_nanogpt(clone, threads=1) as baseline, launch_platform(words) as platform_process:
        times = alternate(baseline, platform_process, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
    ratios = [baseline_s / platform_s for baseline_s, platform_s in times]
    log_progress(f"nanoGPT: {median(ratios):.3f} of {len(ratios)} pairs of turns")
    low, _, high = quantiles(ratios, n=4)
    rates = [12 * 64 / median(column) for column in zip(*times, strict=True)]
    speed = (*rates, median(ratios), [low, high], len(ratios), NANOGPT_GOAL, median(ratios) >= NANOGPT_GOAL)
    table.add_row("nanoGPT's recipe for CPUs", 0, *speed, *[None] * 5)


def _measure(case: Case, rounds: int, address: str, table: Table) -> None:
    overrides, config = make_settings(case.overrides, case.workers, STEPS)
    with (
        launch_torch_baseline(config, case.workers) as baseline,
        launch_platform([*overrides, f"cluster.address={address}"]) as platform_process,
    ):
        times = alternate(baseline, platform_process, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
        peaks = baseline.read_peak_rss_mib(), platform_process.read_peak_rss_mib()
    tokens = config.train.global_batch_size * config.train.seq_len
    ratios = [baseline_s / platform_s for baseline_s, platform_s in times]
    log_progress(
        f"{case.name}, {case.workers} workers: {median(ratios):.3f} of {len(ratios)} pairs of turns; peaks {peaks} MiB"
    )
    low, _, high = quantiles(ratios, n=4)
    table.add_row(
        case.name,
        case.workers,
        tokens / median(baseline_s for baseline_s, _ in times),
        tokens / median(platform_s for _, platform_s in times),
        median(ratios),
        [low, high],
        len(ratios),
        case.goal,
        median(ratios) >= case.goal,
        *peaks,
        peaks[1] - peaks[0],
        MEMORY_GOAL_MIB,
        peaks[1] - peaks[0] <= MEMORY_GOAL_MIB,
    )
