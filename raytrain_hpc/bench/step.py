"""`bench step`: steady training speed and memory, compared with a plain PyTorch loop and with models of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from raytrain_hpc.bench.contenders import check_first_losses, launch_platform, launch_torch_baseline, log_progress
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.interleave import TrainingProcess, alternate, alternate_with_each
from raytrain_hpc.bench.nanogpt_baseline import OVERRIDES, check_clone, launch_nanogpt
from raytrain_hpc.bench.peer_check import NANOGPT, check_peers
from raytrain_hpc.bench.results_table import Table, Value
from raytrain_hpc.bench.torch_baseline import PLAIN
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


COLUMNS = (
    *("model", "workers", "peer", "peer tok/s", "platform tok/s", "ratio", "middle half", "turns", "goal", "met"),
    *("peer MiB", "platform MiB", "extra MiB", "goal MiB", "memory met", "first loss off by"),
)


def run(rounds: int, against: Mapping[str, Path | None] | None = None) -> Table:
    """Alternate the platform and each peer, `rounds` times eight turns each for every case.

    `against`: peers beside the plain loop: libraries, and clones of other trainers by name (nanogpt).

    Raises:
        MissingDependencyError: A library of `against` cannot be imported.
        RunFailedError: A clone is none, a run failed, or a peer trains another model.
    """
    clones = {name: directory for name, directory in (against or {}).items() if directory is not None}
    libraries = [name for name in against or {} if name not in clones]
    check_peers(libraries)
    if NANOGPT in clones:
        check_clone(clones[NANOGPT])
    table = Table("bench step: the platform compared with a plain PyTorch loop and other peers", COLUMNS)
    with idle_ray(cpus=4) as address:
        for case in CASES:
            _measure(case, rounds, address, (PLAIN, *libraries), table)
    if NANOGPT in clones:
        _measure_nanogpt(clones[NANOGPT], rounds, table)
    table.notes += [
        "all runs of a model are started; the platform alternates with each peer in turns of a few steps, the others "
        "stopped by SIGSTOP; ratio: median over pairs of consecutive turns, each by the median time from the end of a "
        "step to the end of the next; middle half: the quartiles of these ratios; tok/s: medians over the turns",
        "peers: one Python process, or DDP under torchrun; AdamW(fused=True), clip_grad_norm_, the same weights, "
        "tokens, microbatches and number of threads (1); plain: the platform's decoder; transformers: its model; "
        "torchtitan: its Llama 3 and loss under FSDP2; platform: `raytrain-hpc train` with TensorBoard on",
        "first loss off by: difference between the losses of the first step; more than rounding is an error",
        "the Ray cluster of the platform's workers is also up, but idle, during the peers' turns",
        "MiB: peak resident memory of rank 0's process",
    ]
    return table


def _measure_nanogpt(clone: Path, rounds: int, table: Table) -> None:
    """Compare with nanoGPT's own loop at its recipe for CPUs. Its memory is not compared: it has another process."""
    words = [*OVERRIDES, f"train.steps={STEPS}"]
    with launch_nanogpt(clone, threads=1) as baseline, launch_platform(words) as platform_process:
        times = alternate(baseline, platform_process, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
    speed = _summarize(NANOGPT, times, 12 * 64, NANOGPT_GOAL)
    table.add_row("nanoGPT's recipe for CPUs", 0, NANOGPT, *speed, *[None] * 6)


def _measure(case: Case, rounds: int, address: str, peers: Sequence[str], table: Table) -> None:
    overrides, config = make_settings(case.overrides, case.workers, STEPS)
    with ExitStack() as stack:
        baselines = [stack.enter_context(launch_torch_baseline(config, case.workers, peer)) for peer in peers]
        platform = stack.enter_context(launch_platform([*overrides, f"cluster.address={address}"]))
        times = alternate_with_each(baselines, platform, rounds * PAIRS_PER_ROUND, WARMUP_STEPS)
        peaks = [process.read_peak_rss_mib() for process in (*baselines, platform)]
        differences = [compare_first_losses(peer, run, platform) for peer, run in zip(peers, baselines, strict=True)]
    tokens = config.train.global_batch_size * config.train.seq_len
    for peer, pairs, peak, difference in zip(peers, times, peaks, differences, strict=False):
        is_plain = peer == PLAIN
        extra_mib = peaks[-1] - peak
        speed = _summarize(
            f"{case.name}, {case.workers} workers, {peer}", pairs, tokens, case.goal if is_plain else None
        )
        goal: list[Value] = [MEMORY_GOAL_MIB, extra_mib <= MEMORY_GOAL_MIB] if is_plain else [None, None]
        table.add_row(case.name, case.workers, peer, *speed, peak, peaks[-1], extra_mib, *goal, difference)


def compare_first_losses(peer: str, run: TrainingProcess, platform: TrainingProcess) -> float | None:
    """Return by how much the losses of the first step differ; None if a run does not tell its losses.

    Raises:
        RunFailedError: They differ by more than rounding in fp32.
    """
    if run.read_losses is None or platform.read_losses is None:
        return None
    losses, platform_losses = run.read_losses(), platform.read_losses()
    check_first_losses(peer, losses, platform_losses, "fp32")
    return abs(losses[0] - platform_losses[0])


def _summarize(name: str, times: Sequence[tuple[float, float]], tokens: int, goal: float | None) -> list[Value]:
    """Return both rates, their ratio with its quartiles, the number of pairs of turns, and the goal."""
    ratios = [peer_s / platform_s for peer_s, platform_s in times]
    log_progress(f"{name}: {median(ratios):.3f} of {len(ratios)} pairs of turns")
    low, _, high = quantiles(ratios, n=4)
    rates = [tokens / median(column) for column in zip(*times, strict=True)]
    is_met = None if goal is None else median(ratios) >= goal
    return [*rates, median(ratios), [low, high], len(ratios), goal, is_met]
