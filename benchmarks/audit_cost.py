"""Cost of audits by ranks and by a spare, at several intervals, beside runs without audits.

    python benchmarks/audit_cost.py PAIRS [INTERVAL ...]

Trains a small model on one worker, so that on two cores a spare has a core of its own. For each interval and auditor,
a run with audits and one without have turns of a few seconds. The ratio is that of the mean times of the steps of all
turns, in which audits have the share that they have in a run; the middle half is of the ratios of pairs of turns.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from statistics import fmean, quantiles

from raytrain_hpc.bench.contenders import launch_platform
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.interleave import TrainingProcess, alternate
from raytrain_hpc.bench.overhead import STEPS, WARMUP_STEPS
from raytrain_hpc.bench.workloads import MEDIUM, make_settings

# Of short steps, so that a turn has about as many as the longest interval.
MODEL = ("model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.vocab_size=512", "train.seq_len=64")
BASELINE = ("train.deterministic=elastic", "checkpoint.snapshot_interval=0", "fault.replica_check_interval=0")
INTERVALS = ("1", "10", "100", "auto")


def compute_turn_times(process: TrainingProcess) -> list[float]:
    """Return the mean time of the steps in each turn but the first, in which the runs get to know their speed."""
    commits, times = process.read_commit_times(), []
    for start, end in process.turns[1:]:
        in_turn = [commit for commit in commits if start < commit < end]
        times.append(fmean(after - before for before, after in pairwise(in_turn)))
    return times


def measure(address: str, words: tuple[str, ...], pairs: int) -> tuple[float, float, list[float]]:
    """Return the mean step times without and with audits, and the ratios of rates of all pairs of turns."""
    runs = [
        [
            *make_settings((*MEDIUM, *MODEL, "train.micro_batch_size=4", *BASELINE, *more), 1, STEPS)[0],
            *(f"cluster.address={address}", "data.engine=local"),
        ]
        for more in ((), words)
    ]
    with launch_platform(runs[0], "the run without audits") as baseline, launch_platform(runs[1], "audits") as audited:
        alternate(baseline, audited, pairs, WARMUP_STEPS)
        times = compute_turn_times(baseline), compute_turn_times(audited)
    ratios = [baseline_s / audited_s for baseline_s, audited_s in zip(*times, strict=True)]
    return fmean(times[0]), fmean(times[1]), ratios


def main(pairs: str, *intervals: str) -> None:
    """Print one row per interval and auditor."""
    print("| interval | audited by | s per step without | with | ratio of rates | middle half |\n| " + "--- | " * 6)
    with idle_ray(cpus=4) as address:
        for interval in intervals or INTERVALS:
            by_ranks = (f"fault.audit_interval={interval}",)
            by_spare = ("fault.audit_interval=1000000", f"fault.spare_audit_interval={interval}", "cluster.spares=1")
            for name, words in (("ranks", by_ranks), ("a spare", by_spare)):
                without, audited, ratios = measure(address, words, int(pairs))
                low, _, high = quantiles(ratios, n=4)
                row = f"{interval} | {name} | {without:.4f} | {audited:.4f} | {without / audited:.3f}"
                print(f"| {row} | {low:.3f} to {high:.3f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
