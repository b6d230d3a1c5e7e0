"""Alternate training runs of two checkouts of this project in one run, and compare their step times.

    python benchmarks/compare_versions.py OTHER_CHECKOUT PAIRS [key=value ...]

Both sides train the 25M model of `bench overhead` on two workers with the same settings, each in a Ray of its own that
its checkout has started, and have turns of a few steps. The ratio is the step time of OTHER_CHECKOUT by that of this
one: above 1, this one is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from raytrain_hpc.bench.contenders import launch_platform, scratch_dir
from raytrain_hpc.bench.interleave import TrainingProcess, alternate
from raytrain_hpc.bench.overhead import STEPS, WARMUP_STEPS, WORKERS
from raytrain_hpc.bench.workloads import MEDIUM, make_settings

OWN_CHECKOUT = Path(__file__).parents[1]


@contextmanager
def launch_checkout(checkout: Path, words: Sequence[str]) -> Iterator[TrainingProcess]:
    """Start a run of the code in `checkout`, and check that its workers have loaded that code."""
    settings = [*make_settings((*MEDIUM, *words), WORKERS, STEPS)[0], "data.engine=local"]
    with scratch_dir() as directory:
        environment = {"PYTHONPATH": str(checkout), "RAY_TMPDIR": str(directory)}
        with launch_platform(settings, f"the run of {checkout}", environment) as process:
            process.wait_for_steps(1)
            for pid in process.read_worker_pids():
                variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
                if not any(variable.startswith(f"PYTHONPATH={checkout}") for variable in variables):
                    raise SystemExit(f"process {pid} of {checkout} runs other code")
            yield process


def main(other: str, pairs: str, *words: str) -> None:
    """Print the ratio of step times, its quartiles, and the step times."""
    with launch_checkout(Path(other).resolve(), words) as theirs, launch_checkout(OWN_CHECKOUT, words) as ours:
        times = alternate(theirs, ours, int(pairs), WARMUP_STEPS)
    ratios = [theirs_s / ours_s for theirs_s, ours_s in times]
    low, _, high = quantiles(ratios, n=4)
    print(f"{median(ratios):.3f} ({low:.3f} to {high:.3f}) of {len(ratios)} pairs", end="; ")
    print(f"{median(s for s, _ in times):.4f} s per step there, {median(s for _, s in times):.4f} s here")


if __name__ == "__main__":
    main(*sys.argv[1:])
