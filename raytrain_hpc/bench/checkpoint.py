"""`bench checkpoint`: what asynchronous checkpoints cost a run, and saving and loading beside torch's DCP."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from raytrain_hpc.bench.arms import run_platform, say
from raytrain_hpc.bench.cases import MEDIUM, settings
from raytrain_hpc.bench.formats import measure_formats
from raytrain_hpc.bench.ray_idle import idle_ray
from raytrain_hpc.bench.table import Table

GOAL = 0.05
EVERY = 10
FIRST, LAST = EVERY - 1, 4 * EVERY - 1  # a window that holds three checkpoints, each from its copy to its end
STEPS = LAST + 2  # the last step of a run is left out: evaluation and saving follow it


@dataclass(frozen=True)
class Arm:
    """What one run gave over the window."""

    tokens_per_s: float
    copy_ms: float | None  # median time that a step waited for a checkpoint


def run(rounds: int) -> Table:
    """Alternate runs with and without checkpoints, then saves and loads of the two formats."""
    table = Table(
        f"bench checkpoint: a checkpoint every {EVERY} steps, written behind them; 25M parameters, 1,024 tokens a step",
        ("measure", "workers", "platform", "peer", "change", "change each round", "goal", "met"),
    )
    with idle_ray(cpus=4) as address:
        for workers in (1, 2):
            _measure(workers, rounds, address, table)
    for measure, (ours, theirs) in measure_formats(rounds).items():
        ratios = [mine / peer - 1 for mine, peer in zip(ours, theirs, strict=True)]
        table.add(f"{measure}, ms", None, median(ours), median(theirs), median(ratios), ratios, None, None)
    table.notes += [
        f"tok/s: over the whole time from step {FIRST} to step {LAST}, which holds three checkpoints from the copy to "
        "the end of their writing; peer: the same run without checkpoints, in turn; change: throughput lost",
        "save and load: weights and AdamW state in one process, in turn; peer: torch.distributed.checkpoint; ours "
        "writes, takes a SHA-256 on the way, syncs and renames; change: the platform's time over the peer's, minus 1",
        "medians over the rounds",
    ]
    return table


def _measure(workers: int, rounds: int, address: str, table: Table) -> None:
    pairs = []
    for _ in range(rounds):
        pairs.append((_run(workers, 0, address), _run(workers, EVERY, address)))
        say(f"{workers} workers, without and with checkpoints: {pairs[-1]}")
    lost = [1 - with_.tokens_per_s / without.tokens_per_s for without, with_ in pairs]
    with_rate = median(with_.tokens_per_s for _, with_ in pairs)
    without_rate = median(without.tokens_per_s for without, _ in pairs)
    table.add("tok/s", workers, with_rate, without_rate, median(lost), lost, GOAL, median(lost) <= GOAL)
    waited = median(with_.copy_ms for _, with_ in pairs if with_.copy_ms is not None)
    table.add("wait of a step for its checkpoint, ms", workers, waited, None, None, None, None, None)


def _run(workers: int, every: int, address: str) -> Arm:
    words, config = settings((*MEDIUM, f"checkpoint.every={every}"), workers, STEPS)
    ran = run_platform([*words, f"cluster.address={address}"])
    seconds = ran.unix[LAST - 1] - ran.unix[FIRST - 1]
    tokens = (LAST - FIRST) * config.train.global_batch * config.train.seq_len
    waits = [1000 * line["time/checkpoint_s"] for line in ran.metrics[FIRST:LAST] if line["time/checkpoint_s"]]
    return Arm(tokens / seconds, median(waits) if waits else None)
