"""Training-at-scale exercise: memory per rank, cost of tensor parallelism, pipeline bubble by number of microbatches.

    python examples/training_at_scale.py [fits|tp|microbatches ...] [--steps N] [--out DIR] [key=value ...]

`fits` only plans and takes a second. `tp` and `microbatches` train small models in processes on this machine, without a
GPU, and take a few minutes. Without a part, all three run. docs/training_at_scale.md explains the output.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import raytrain_hpc as rt
from raytrain_hpc import plan

Row = dict[str, str | int | float]

DEVICE_GIB = 80
LARGE = ["model.preset=llama3_8b", "train.seq_len=8192", "train.global_batch_size=64", "train.micro_batch_size=1"]
LARGE += ["train.dtype=bf16", "parallel.pp=1", "parallel.cp=1"]  # otherwise plan chooses them
# (ranks, tp, ZeRO stage): data parallelism only, then sharded state, then tensor parallelism as well.
CANDIDATES = [(1, 1, 0), (8, 1, 0), (64, 1, 0), (8, 1, 1), (8, 1, 2), (8, 1, 3)]
CANDIDATES += [(8, 2, 1), (8, 2, 2), (8, 2, 3), (8, 4, 1), (8, 4, 3), (8, 8, 0)]
PARTS = ("fits", "tp", "microbatches")

SMALL = ["model.hidden_size=256", "model.num_layers=8", "model.num_heads=8", "model.vocab_size=256"]
SMALL += ["data.path=synthetic", "train.seq_len=128", "lr_scheduler.name=constant", "lr_scheduler.warmup_steps=0"]
SMALL += ["eval.samples=1", "logging.sample_tokens=0", "logging.tensorboard=false", "cluster.device=cpu"]
SMALL += ["run.resume=never"]  # refuse an --out with existing runs instead of reading them as measurements
WARMUP = 2  # steps at the start of a run that are not measured
STAGES = 2  # pipeline stages, one per rank


def fits(words: Sequence[str]) -> list[Row]:
    """Compute the size of the state per rank under each layout. Plans only; nothing is trained."""
    rows: list[Row] = []
    for ranks, tp, zero in CANDIDATES:
        config = rt.load_config(None, [*LARGE, *words, f"parallel.tp={tp}", f"parallel.zero={zero}"])
        state = plan(config, workers=ranks)["state_bytes_per_rank"] / 2**30
        row: Row = {"ranks": ranks, "dp": ranks // tp, "tp": tp, "ZeRO": zero, "state GiB / rank": state}
        row[f"left of {DEVICE_GIB} GiB"] = DEVICE_GIB - state
        rows.append(row | {"state fits": "yes" if state <= DEVICE_GIB else "no"})
    return rows


def tensor_parallel(
    words: Sequence[str], out: Path, steps: int, degrees: Sequence[int] = (1, 2, 4), parts: Sequence[int] = (1, 2, 4)
) -> list[Row]:
    """Measure step times of a model, and of the model with a half and a quarter of its layers, for every tp degree."""
    words = [*SMALL, "train.global_batch_size=4", "train.micro_batch_size=4", *words]
    layers = rt.load_config(None, words).model.num_layers
    rows: list[Row] = []
    for count in (layers // part for part in parts):
        of_first = 0.0
        for tp in degrees:
            changes = [f"model.num_layers={count}", f"parallel.tp={tp}", f"cluster.workers={tp}"]
            seconds = measure([*words, *changes], out / f"tp{tp}-layers{count}", steps)
            low, middle, high = (1000 * cut for cut in quantiles(seconds, n=4, method="inclusive"))
            of_first = of_first or middle
            row: Row = {"layers": count, "tp": tp, "step ms": middle, "middle half": f"{low:.0f} to {high:.0f}"}
            rows.append(row | {f"times tp={degrees[0]}": middle / of_first})
    return rows


def fit_layer_time(rows: Iterable[Row], cores: int) -> list[Row]:
    """Compute the time per layer and of the rest of a step, by the line through the most and the fewest layers."""
    times: dict[int, dict[int, float]] = {}
    for row in rows:
        times.setdefault(int(row["tp"]), {})[int(row["layers"])] = float(row["step ms"])
    result: list[Row] = []
    for tp, of_layers in times.items():
        few, many = min(of_layers), max(of_layers)
        slope = (of_layers[many] - of_layers[few]) / (many - few)
        whole = float(result[0]["ms / layer"]) if result else slope
        # More ranks than cores share the cores and do not reduce the time further.
        row = {"tp": tp, "ms / layer": slope, "arithmetic alone": whole / min(tp, cores)}
        result.append(row | {"ms outside of layers": of_layers[few] - few * slope})
    return result


def microbatches(
    words: Sequence[str], out: Path, steps: int, counts: Sequence[int] = (1, 2, 4, 8, 16), size: int = 2
) -> list[Row]:
    """Measure the throughput of 1F1B by number of microbatches, with the closed form and the recorded timeline."""
    words = [*SMALL, f"train.micro_batch_size={size}", *words, f"parallel.pp={STAGES}", f"cluster.workers={STAGES}"]
    words += ["parallel.pp_schedule=1f1b", "logging.pipeline_timeline_interval=1"]
    rows: list[Row] = []
    for m in counts:
        run_dir, settings = out / f"microbatches{m}", [*words, f"train.global_batch_size={m * size}"]
        seconds = median(measure(settings, run_dir, steps))
        rate = m * size * rt.load_config(None, settings).train.seq_len / seconds
        share = m / (m + STAGES - 1)
        row: Row = {"microbatches": m, "step ms": 1000 * seconds, "tok/s": rate, "ideal share": share}
        first = rows[0] if rows else row
        row[f"tok/s times m={counts[0]}"] = rate / float(first["tok/s"])
        row["ideal"] = share / float(first["ideal share"])
        row["bubble"] = (STAGES - 1) / (m + STAGES - 1)
        row["recorded idle"] = median(
            compute_idle_fraction(path) for path in sorted(run_dir.glob("timeline/*.json"))[WARMUP:]
        )
        rows.append(row)
    return rows


def compute_idle_fraction(timeline: Path) -> float:
    """Return the idle share of all pipeline ranks between the first and the last pass of the timeline."""
    passes: list[tuple[float, float]] = [(begin, end) for *_, begin, end in json.loads(timeline.read_text())["rows"]]
    wall = max(end for _, end in passes) - min(begin for begin, _ in passes)
    return 1.0 - sum(end - begin for begin, end in passes) / (STAGES * wall)


def measure(words: Sequence[str], run_dir: Path, steps: int) -> list[float]:
    """Train `steps` steps. Return the seconds of each, without the warm-up steps."""
    config = rt.load_config(None, [*words, f"run.dir={run_dir}", f"train.steps={steps}"])
    if rt.train(config, quiet=True).outcome != "done":
        sys.exit("stopped")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    seconds = [float(json.loads(line)["time/step_s"]) for line in lines][WARMUP:]
    print(f"{run_dir.name}: {1000 * median(seconds):.0f} ms per step", file=sys.stderr, flush=True)
    return seconds


def markdown(rows: Sequence[Row]) -> str:
    """Format rows with the same keys as a Markdown table."""
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
    lines = (" | ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "".join(f"| {line} |\n" for line in lines)


def _cell(value: str | int | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


@contextmanager
def start_shared_ray() -> Iterator[None]:
    """Start one Ray on this machine that all runs of this process use, instead of one Ray per run."""
    import ray

    if ray.is_initialized():
        yield
        return
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # by default workers are at nice 15
    ray.init(address="local", num_cpus=5, include_dashboard=False, logging_level=logging.WARNING, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def report(part: str, words: Sequence[str], out: Path, steps: int) -> None:
    """Measure or plan one part, and print its tables."""
    cores = len(os.sched_getaffinity(0))
    if part == "fits":
        print(f"## fits: planned state of a model, on devices of {DEVICE_GIB} GiB\n\n{markdown(fits(words))}")
        print("State: weights, gradients and optimizer. Activations are not counted; they must fit into the rest.\n")
    elif part == "tp":
        rows = tensor_parallel(words, out, steps)
        print(f"## tp: iteration times on {cores} CPU cores, one thread per rank\n\n{markdown(rows)}")
        print(markdown(fit_layer_time(rows, cores)))
        print("arithmetic alone: a layer's time at the first tp, divided by the smaller number of ranks and cores.\n")
    else:
        rows = microbatches(words, out, steps)
        print(f"## microbatches: 1F1B on {STAGES} pipeline ranks, {cores} CPU cores\n\n{markdown(rows)}")
        print(f"ideal share: m/(m+p-1); bubble: (p-1)/(m+p-1); p={STAGES}. recorded idle: from run.dir/timeline.\n")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts (fits, tp, microbatches) and settings (key=value)")
    parser.add_argument("--steps", type=int, default=12, help=f"steps per run; the first {WARMUP} are not measured")
    parser.add_argument("--out", type=Path, help="keep the runs in this directory")
    given = parser.parse_intermixed_args(arguments)
    settings = [word for word in given.words if "=" in word]
    parts = [word for word in given.words if "=" not in word] or PARTS
    if set(parts) - set(PARTS) or given.steps < WARMUP + 2:
        parser.error(f"the parts are {', '.join(PARTS)}; --steps is at least {WARMUP + 2}")
    with start_shared_ray() if set(parts) - {"fits"} else nullcontext(), TemporaryDirectory(prefix="scale-") as scratch:
        for part in parts:
            report(part, settings, given.out or Path(scratch), given.steps)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except rt.RaytrainError as error:
        sys.exit(f"error: {error}")
