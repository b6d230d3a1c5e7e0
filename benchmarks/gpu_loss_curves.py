"""Compare the loss curves of compute types on one GPU: `python benchmarks/gpu_loss_curves.py --out DIR`.

Trains a Llama of 26 million parameters on bytes of text once per compute type, from the same weights and on the same
batches, all at the same time in a process per run. Writes the loss of each step to DIR/RUN.jsonl, every 500 steps with
the validation loss, and the output of the process to DIR/RUN.log. Prints a table of the differences from fp32. The text
is the source code of the standard library, or `--text FILE`.
`--dry-run` trains tiny models for some steps on a CPU, to test this script. Needs no Ray.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

STEPS, DRY_RUN_STEPS = 2000, 12
WINDOW, EVAL_INTERVAL = 100, 500  # steps; less if there are few steps
BASE = "fp32"
RUNS = {
    BASE: ("train.dtype=fp32",),
    "bf16": ("train.dtype=bf16",),
    "bf16-residual": ("train.dtype=bf16", "train.residual_dtype=bf16"),
    "float8": ("train.dtype=float8",),
    "float8-head": ("train.dtype=float8", "train.float8_head=true"),
}
COMMON = ("cluster.workers=0", "optimizer.name=adamw", "lr_scheduler.name=cosine")
MODEL = (  # every size is a multiple of 16, as float8 products need
    *("model.hidden_size=384", "model.num_layers=6", "model.num_heads=6", "train.seq_len=512"),
    *("train.global_batch_size=8", "train.micro_batch_size=8", "optimizer.lr=1e-3"),
    *("train.compile=true", "cluster.device=cuda"),
)
TINY = (
    *("model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "train.seq_len=32"),
    *("train.global_batch_size=4", "train.micro_batch_size=4", "optimizer.lr=1e-2", "eval.samples=8"),
    *("train.compile=false", "cluster.device=cpu"),
)
ERROR_LINES = 5


@dataclass(frozen=True)
class Schedule:
    """Lengths in steps, derived from that of the run: 2000 steps have a warmup of 100."""

    steps: int

    @property
    def warmup(self) -> int:
        """Steps of the learning rate's warmup."""
        return self.steps // 20

    @property
    def window(self) -> int:
        """Steps whose mean loss is compared."""
        return min(WINDOW, self.steps // 4)

    @property
    def eval_interval(self) -> int:
        """Steps between two evaluations."""
        return min(EVAL_INTERVAL, self.steps // 2)


@dataclass(frozen=True)
class Curve:
    """Training loss of each step, and the last validation loss; None if there was no evaluation."""

    losses: list[float]
    val_loss: float | None


def train(name: str, data: str, out: Path, schedule: Schedule, seed: int, *, is_dry_run: bool) -> None:
    """Train with the settings of a run in this process, and write its losses while it trains."""
    import torch

    from raytrain_hpc.bench.local_trainer import open_trainer, require_gpu
    from raytrain_hpc.config.loader import load_config

    lengths = (f"train.steps={schedule.steps}", f"lr_scheduler.warmup_steps={schedule.warmup}")
    places = (f"data.path={data}", f"run.dir={out / name}", f"run.seed={seed}")  # no step is saved in run.dir
    config = load_config(None, [*COMMON, *(TINY if is_dry_run else MODEL), *RUNS[name], *lengths, *places])
    device = torch.device("cpu") if is_dry_run else require_gpu("gpu_loss_curves")
    with get_curve_path(out, name).open("w") as file, open_trainer(config, device) as trainer:
        evaluator = trainer.completion.evaluator
        for step in range(1, schedule.steps + 1):
            line = {"step": step, "loss": trainer.train_step(step - 1).loss}
            is_due = step % schedule.eval_interval == 0 or step == schedule.steps
            if evaluator is not None and is_due and (metrics := evaluator.evaluate()) is not None:
                line["val_loss"] = metrics["val/loss"]
            file.write(json.dumps(line) + "\n")
            file.flush()


def get_curve_path(out: Path, name: str) -> Path:
    """Return the file of a run's losses."""
    return out / f"{name}.jsonl"


def run_all(commands: dict[str, list[str]], out: Path, timeout_s: float) -> dict[str, str]:
    """Run all commands at the same time. Return the error of each run that failed or was ended by the timeout."""
    processes, errors = {}, {}
    deadline = time.monotonic() + timeout_s
    try:
        for name, command in commands.items():
            get_curve_path(out, name).unlink(missing_ok=True)  # of an earlier call
            with (out / f"{name}.log").open("w") as log:
                processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
        for name, process in processes.items():
            try:
                if code := process.wait(max(deadline - time.monotonic(), 0)):
                    lines = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()
                    errors[name] = "\n".join([f"exit code {code}", *lines[-ERROR_LINES:]])
            except subprocess.TimeoutExpired:
                errors[name] = f"ended after {timeout_s:g} s"
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return errors


def read_curve(path: Path) -> Curve:
    """Return the curve in a file of losses; an empty one if there is none."""
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    val_losses = [line["val_loss"] for line in lines if "val_loss" in line]
    return Curve([line["loss"] for line in lines], val_losses[-1] if val_losses else None)


def compute_largest_difference(losses: Sequence[float], base: Sequence[float], window: int) -> tuple[float, int]:
    """Return the difference of window means that is largest in magnitude, in percent of `base`, and its last step.

    Windows begin at every step of the common steps; steps count from 1.

    Raises:
        ValueError: There are fewer than `window` common steps.
    """
    sums, base_sums = ([0.0, *accumulate(values)] for values in (losses, base))
    num_steps = min(len(losses), len(base))
    differences = []
    for end in range(window, num_steps + 1):
        mean, base_mean = (total[end] - total[end - window] for total in (sums, base_sums))
        differences.append((100 * (mean / base_mean - 1), end))
    return max(differences, key=lambda difference: abs(difference[0]))


def format_row(name: str, curve: Curve, base: Curve, schedule: Schedule) -> str:
    """Return the line of a run in the table. It is compared with `base`, another run, over the steps that both have."""
    window, warmup = schedule.window, schedule.warmup
    common = min(len(curve.losses), len(base.losses))
    cells = [name, str(len(curve.losses)), "-", "-", "-", "-", "-"]
    if len(curve.losses) >= window:
        cells[2] = f"{fmean(curve.losses[-window:]):.4f}"
    if curve is not base and common >= warmup + window:
        losses, base_losses = curve.losses[:common], base.losses[:common]
        cells[3] = f"{100 * (fmean(losses[-window:]) / fmean(base_losses[-window:]) - 1):+.3f}"
        largest, end = compute_largest_difference(losses[warmup:], base_losses[warmup:], window)
        cells[4] = f"{largest:+.3f} ({warmup + end - window + 1} to {warmup + end})"
    if curve.val_loss is not None:
        cells[5] = f"{curve.val_loss:.4f}"
        if curve is not base and base.val_loss is not None and len(curve.losses) == len(base.losses):
            cells[6] = f"{100 * (curve.val_loss / base.val_loss - 1):+.3f}"
    return f"| {' | '.join(cells)} |"


def format_table(curves: dict[str, Curve], schedule: Schedule) -> str:
    """Return the table of all runs in Markdown."""
    window = schedule.window
    titles = ["run", "steps", f"mean loss of its last {window} steps", f"difference from {BASE} in %"]
    titles += [f"largest difference of {window} steps in % (steps)", "validation loss", f"difference from {BASE} in %"]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(['---'] * len(titles))} |"]
    base = curves.get(BASE, Curve([], None))
    return "\n".join([*lines, *(format_row(name, curve, base, schedule) for name, curve in curves.items())])


def prepare_text(text: Path | None, folder: Path) -> Path:
    """Return the directory of the tokens of a text, one per byte; its last tenth is the validation split."""
    from raytrain_hpc.data.dataset.builtin import prepare_stdlib_dataset
    from raytrain_hpc.data.preprocess.prepare import prepare
    from raytrain_hpc.errors import DataError

    try:
        if text is None:
            return prepare_stdlib_dataset()
        prepare([text], folder / "dataset", tokenizer="byte", engine="local")
    except DataError as error:
        sys.exit(f"gpu_loss_curves.py: {error}")
    return folder / "dataset"


def parse_arguments() -> argparse.Namespace:
    """Parse the command line, and check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_loss_curves"), help="directory of the results")
    parser.add_argument("--text", type=Path, help="file or folder of text, instead of the standard library")
    parser.add_argument("--runs", default=",".join(RUNS), help="runs, separated by commas; all by default")
    parser.add_argument("--steps", type=int, help=f"{STEPS} by default, {DRY_RUN_STEPS} with --dry-run")
    parser.add_argument("--seed", type=int, default=1337, help="of weights and data order")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds after which all runs are ended")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--data", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.runs = arguments.runs.split(",")
    arguments.steps = arguments.steps or (DRY_RUN_STEPS if arguments.dry_run else STEPS)
    if unknown := set(arguments.runs) - set(RUNS):
        parser.error(f"--runs {', '.join(sorted(unknown))}: known are {', '.join(RUNS)}")
    if arguments.steps < 4:
        parser.error(f"--steps {arguments.steps}: must be at least 4")
    return arguments


def main() -> None:
    """Train all runs and print the table. The exit code is 1 if a run failed."""
    arguments = parse_arguments()
    schedule, out = Schedule(arguments.steps), arguments.out
    if arguments.one:
        train(arguments.one, arguments.data, out, schedule, arguments.seed, is_dry_run=arguments.dry_run)
        return
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="rt-", ignore_cleanup_errors=True) as folder:
        options = ["--data", str(prepare_text(arguments.text, Path(folder))), "--out", str(out)]
        options += ["--steps", str(schedule.steps), "--seed", str(arguments.seed)]
        options += ["--dry-run"] if arguments.dry_run else []
        commands = {name: [sys.executable, __file__, "--one", name, *options] for name in arguments.runs}
        errors = run_all(commands, out, arguments.timeout)
    curves = {name: read_curve(get_curve_path(out, name)) for name in arguments.runs}
    print(format_table(curves, schedule))
    for name, error in errors.items():
        print(f"\n{name} failed: {error}", file=sys.stderr)
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
