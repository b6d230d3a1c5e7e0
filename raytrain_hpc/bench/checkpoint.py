"""`bench checkpoint`: overhead of asynchronous checkpoints, and saving and loading compared with torch's DCP."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from raytrain_hpc.bench.checkpoint_formats import Timings, measure_formats, measure_hashing
from raytrain_hpc.bench.contenders import log_progress, run_platform
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import MEDIUM, make_settings

GOAL = 0.05
INTERVAL = 10  # steps over which the overhead of a checkpoint is measured
CYCLES_PER_ROUND = 2


def run(rounds: int, url: str | None = None) -> Table:
    """Measure runs that alternate ten steps with a checkpoint and ten without, then save and load in both formats.

    `url`: also save and load below this URL of an S3 store.
    """
    table = Table(
        f"bench checkpoint: an asynchronous checkpoint every {INTERVAL} steps; 25M parameters, 1,024 tokens per step",
        ("measure", "workers", "platform", "peer", "change", "change each time", "goal", "met"),
    )
    with idle_ray(cpus=4) as address:
        for workers in (1, 2):
            _measure_throughput(workers, rounds * CYCLES_PER_ROUND, address, table)
    _compare_formats("local disk", measure_formats(rounds), table)
    if url is not None:
        _compare_formats("S3", measure_formats(rounds, url), table)
    table.add_row("hashing, GB/s per core", None, measure_hashing(), None, None, None, None, None)
    table.notes += [
        f"tok/s: {INTERVAL} steps during which a checkpoint is staged and written; peer: the {INTERVAL} steps before "
        "and after them in the same run, without a checkpoint; change: throughput lost",
        "save and load: weights and AdamW state in one process, alternating; peer: torch.distributed.checkpoint, on S3 "
        "with the S3 connector for PyTorch; the platform also computes checksums, syncs and publishes; choose and "
        "load: as a run resumes, verified; change: the platform's time over the peer's, minus 1",
        "medians",
    ]
    return table


def _compare_formats(place: str, timings: Timings, table: Table) -> None:
    """Add a row per operation. The goal is a time of at most the peer's."""
    for measure, (platform_ms, peer_ms) in timings.items():
        ratios = [platform / peer - 1 for platform, peer in zip(platform_ms, peer_ms, strict=True)]
        row = (f"{measure}, {place}, ms", None, median(platform_ms), median(peer_ms), median(ratios), ratios)
        table.add_row(*row, 0.0, median(ratios) <= 0.0)


def _measure_throughput(workers: int, cycles: int, address: str, table: Table) -> None:
    steps = 2 * INTERVAL * (cycles + 1) + 2  # the last step is excluded: evaluation and saving follow it
    overrides, config = make_settings((*MEDIUM, f"checkpoint.interval={2 * INTERVAL}"), workers, steps)
    platform_run = run_platform([*overrides, f"cluster.address={address}"])
    with_checkpoint, without_checkpoint = measure_windows(platform_run.commit_times)
    tokens = INTERVAL * config.train.global_batch_size * config.train.seq_len
    lost_fractions = [
        1 - (before + after) / 2 / between
        for between, before, after in zip(with_checkpoint, without_checkpoint, without_checkpoint[1:], strict=False)
    ]
    log_progress(
        f"{workers} workers, throughput lost per checkpoint: "
        f"{', '.join(f'{fraction:.1%}' for fraction in lost_fractions)}"
    )
    rates = (tokens / median(with_checkpoint), tokens / median(without_checkpoint))
    table.add_row(
        "tok/s", workers, *rates, median(lost_fractions), lost_fractions, GOAL, median(lost_fractions) <= GOAL
    )
    waits = [1000 * line["time/checkpoint_s"] for line in platform_run.metrics[:-1] if line["time/checkpoint_s"]]
    table.add_row("time a step waits for staging, ms", workers, median(waits), None, None, None, None, None)


def measure_windows(commit_times: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the seconds of each window of INTERVAL steps after a checkpoint, and of each window without one.

    `commit_times[k]` is the time at which step k + 1 was committed. A checkpoint of step k affects the steps after k.
    The window of the first checkpoint is excluded; the windows without one lie before and after each counted window.
    """
    window_ends = [commit_times[step - 1] for step in range(3 * INTERVAL, len(commit_times), INTERVAL)]
    durations = [after - before for before, after in zip(window_ends, window_ends[1:], strict=False)]
    return durations[1::2], durations[0::2]
