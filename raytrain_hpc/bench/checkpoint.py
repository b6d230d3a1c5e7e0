"""`bench checkpoint`: what asynchronous checkpoints cost a run, and saving and loading beside torch's DCP."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from raytrain_hpc.bench.checkpoint_formats import measure_formats
from raytrain_hpc.bench.contenders import log_progress, run_platform
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.bench.workloads import MEDIUM, make_settings

GOAL = 0.05
INTERVAL = 10  # steps a checkpoint has to be paid from
CYCLES_PER_ROUND = 2


def run(rounds: int) -> Table:
    """Runs that alternate ten steps with a checkpoint and ten without, then saves and loads of the two formats."""
    table = Table(
        f"bench checkpoint: a checkpoint every {INTERVAL} steps, written behind them; 25M parameters, 1,024 tokens a step",
        ("measure", "workers", "platform", "peer", "change", "change each time", "goal", "met"),
    )
    with idle_ray(cpus=4) as address:
        for workers in (1, 2):
            _measure_throughput(workers, rounds * CYCLES_PER_ROUND, address, table)
    for measure, (ours, theirs) in measure_formats(rounds).items():
        ratios = [mine / peer - 1 for mine, peer in zip(ours, theirs, strict=True)]
        table.add_row(f"{measure}, ms", None, median(ours), median(theirs), median(ratios), ratios, None, None)
    table.notes += [
        f"tok/s: of {INTERVAL} steps with a checkpoint behind their first, from its copy to the end of its writing; peer: "
        f"of the {INTERVAL} steps before and after them, which pay for none, in the same run; change: throughput lost",
        "save and load: weights and AdamW state in one process, in turn; peer: torch.distributed.checkpoint; ours "
        "writes, takes a SHA-256 on the way, syncs and renames; change: the platform's time over the peer's, minus 1",
        "medians",
    ]
    return table


def _measure_throughput(workers: int, cycles: int, address: str, table: Table) -> None:
    steps = 2 * INTERVAL * (cycles + 1) + 2  # the last step of a run is left out: evaluation and saving follow it
    words, config = make_settings((*MEDIUM, f"checkpoint.every={2 * INTERVAL}"), workers, steps)
    ran = run_platform([*words, f"cluster.address={address}"])
    paying, free = measure_windows(ran.commit_times)
    tokens = INTERVAL * config.train.global_batch * config.train.seq_len
    lost = [1 - (before + after) / 2 / pays for pays, before, after in zip(paying, free, free[1:], strict=False)]
    log_progress(f"{workers} workers, throughput lost to each checkpoint: {', '.join(f'{one:.1%}' for one in lost)}")
    rates = (tokens / median(paying), tokens / median(free))
    table.add_row("tok/s", workers, *rates, median(lost), lost, GOAL, median(lost) <= GOAL)
    waits = [1000 * line["time/checkpoint_s"] for line in ran.metrics[:-1] if line["time/checkpoint_s"]]
    table.add_row("wait of a step for its checkpoint, ms", workers, median(waits), None, None, None, None, None)


def measure_windows(commit_times: Sequence[float]) -> tuple[list[float], list[float]]:
    """Seconds of the EVERY steps after each checkpoint but the first, and of the EVERY before it and before the next.

    `unix[k]` is when step k + 1 was committed; a checkpoint of step k is paid from the commit of k on.
    """
    ends = [commit_times[step - 1] for step in range(3 * INTERVAL, len(commit_times), INTERVAL)]
    spans = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return spans[1::2], spans[0::2]
