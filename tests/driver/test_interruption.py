"""A run that was stopped, killed or damaged ends with the numbers of an undisturbed run. One rank, no Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.driver.cli_process import WORDS, CliRunner, count_steps, read_curve, signal_after

KILLED_IN_A_SHARD = """
import os, signal
from raytrain_hpc.checkpoint import safetensors_writer
real = safetensors_writer._write_file
def torn(path, chunks):
    if "step-00000012" not in str(path):
        return real(path, chunks)
    with path.open("wb") as file:
        file.write(next(iter(chunks))[:100])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
safetensors_writer._write_file = torn
"""
KILLED_BEFORE_THE_RENAME = """
import os, signal
from raytrain_hpc.checkpoint.directory_publisher import DirectoryPublisher
real = DirectoryPublisher._rename
def rename(self, staging, final):
    if final.name == "step-00000012":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, staging, final)
DirectoryPublisher._rename = rename
"""

STOP_REQUESTED_AFTER_9 = """
import os, signal
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def handle_step(self, metrics):
    real(self, metrics)
    if metrics["step"] == 9:
        os.kill(os.getpid(), signal.SIGTERM)
RunRecorder._handle_step = handle_step
"""


def train_command(run_dir: Path, *words: str) -> list[str]:
    return ["train", *WORDS, f"run.dir={run_dir}", *words]


def read_tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def test_resuming_after_sigterm_at_any_step(cli: CliRunner, reference_curve, tmp_path) -> None:
    draw, run, last_step = random.Random(0), tmp_path / "run", 0
    for _ in range(3):
        patch = signal_after(last_step + draw.randint(1, 4), signal.SIGTERM, draw.uniform(0, 0.02))
        code, output = cli.run(tmp_path / "out", *train_command(run), patch=patch)
        assert code == 3 and "SIGTERM: saving and stopping after the current step; " in output
        step = json.loads((run / "result.json").read_text())["steps"]
        assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
        assert last_step < step < 24 and count_steps(run) == step, "no step is lost or run again"
        last_step = step
    code, output = cli.run(tmp_path / "out", *train_command(run))
    assert code == 0 and f"resumed from {run}/checkpoints/step-{last_step:08d}" in output
    assert read_curve(run) == reference_curve


def signal_in_evaluation(batch: int) -> str:
    """Return a patch: SIGTERM is sent before the `batch`-th batch that the process evaluates."""
    return f"""
import itertools, os, signal
from raytrain_hpc.data.loader.eval_set import EvaluationSet
real, calls = EvaluationSet.get_batch, itertools.count(1)
def batch(self, index):
    if next(calls) == {batch}:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(self, index)
EvaluationSet.get_batch = batch
"""


def read_evaluations(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def test_interrupted_evaluation_is_repeated_on_resume(cli: CliRunner, reference_curve, tmp_path) -> None:
    words = ["eval.interval=6", "eval.samples=40"]  # 20 batches, four times
    uninterrupted, run, out = tmp_path / "whole", tmp_path / "run", tmp_path / "out"
    assert cli.run(out, *train_command(uninterrupted, *words))[0] == 0
    assert sorted(read_evaluations(uninterrupted)) == [6, 12, 18, 24]
    # Stop in the evaluation of step 12, then in the last one: the next process begins with that of step 12.
    for batch, step in ((20 + 13, 12), (20 + 20 + 5, 24)):
        assert cli.run(out, *train_command(run, *words), patch=signal_in_evaluation(batch))[0] == 3
        assert json.loads((run / "result.json").read_text())["steps"] == step
        assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
        assert step not in read_evaluations(run)
    assert cli.run(out, *train_command(run, *words))[0] == 0
    assert read_evaluations(run) == read_evaluations(uninterrupted) and read_curve(run) == reference_curve
    result = json.loads((run / "result.json").read_text())
    assert result["val/loss"] == read_evaluations(run)[24] and result["checkpoint"].endswith("step-00000024")
    code, output = cli.run(out, *train_command(run, *words))
    assert code == 0 and "already trained" in output
    assert count_steps(run) == 26, "only the lines of steps 12 and 24 are repeated, with their evaluation"


def test_resuming_after_sigkill_of_the_driver(cli: CliRunner, reference_curve, tmp_path) -> None:
    run = tmp_path / "run"
    patch = signal_after(10, signal.SIGKILL, 0.01)
    assert cli.run(tmp_path / "out", *train_command(run), patch=patch)[0] == -signal.SIGKILL
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "train/lo')  # as after a kill during a write
    code, output = cli.run(tmp_path / "out", *train_command(run))
    assert code == 0 and "resumed from" in output
    assert read_curve(run) == reference_curve and count_steps(run) > 24


def test_a_start_over_is_announced(cli: CliRunner, reference_curve, tmp_path) -> None:
    run = tmp_path / "run"
    command = train_command(run, "checkpoint.interval=0")
    assert cli.run(tmp_path / "out", *command, patch=signal_after(3, signal.SIGKILL))[0] == -signal.SIGKILL
    steps = count_steps(run)
    code, output = cli.run(tmp_path / "out", *command)
    assert code == 0 and read_curve(run) == reference_curve
    (line,) = [line for line in output.splitlines() if line.startswith("restart ")]
    assert line == f"restart {run} has {steps} steps and no checkpoint: training starts again at step 1"
    assert "restart " not in cli.run(tmp_path / "out", *command)[1]


def test_second_driver_is_refused_while_the_first_runs(cli: CliRunner, reference_curve, tmp_path) -> None:
    run = tmp_path / "run"
    first = cli.start(tmp_path / "out", *train_command(run), patch=signal_after(3, signal.SIGSTOP))
    first.wait_until_stopped()  # alive, but it writes nothing during the check
    before = read_tree(run)
    code, output = cli.run(tmp_path / "second", *train_command(run))
    assert code == 2 and output.splitlines() == [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"pid {first.pid}) is running in it; stop it or choose another run.dir" in output
    assert read_tree(run) == before
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0 and read_curve(run) == reference_curve


@pytest.mark.parametrize(
    "patch", [KILLED_IN_A_SHARD, KILLED_BEFORE_THE_RENAME], ids=["in a shard", "before the rename"]
)
def test_resuming_after_a_kill_during_a_checkpoint_write(cli: CliRunner, reference_curve, tmp_path, patch: str) -> None:
    run = tmp_path / "run"
    assert cli.run(tmp_path / "out", *train_command(run), patch=patch)[0] == -signal.SIGKILL
    assert any(path.name.startswith(".staging-step-00000012") for path in (run / "checkpoints").iterdir())
    code, output = cli.run(tmp_path / "out", *train_command(run))
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000008" in output and "damaged" not in output
    assert read_curve(run) == reference_curve
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def stopped_at_10(cli: CliRunner, tmp_path_factory) -> Path:
    """Return a run directory with checkpoints of steps 4, 8 and 10."""
    directory = tmp_path_factory.mktemp("stopped")
    patch = STOP_REQUESTED_AFTER_9
    assert cli.run(directory / "out", *train_command(directory / "run"), patch=patch)[0] == 3
    assert sorted(p.name[-2:] for p in (directory / "run" / "checkpoints").iterdir()) == ["04", "08", "10"]
    return directory / "run"


def truncate_file(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"
DAMAGES = {
    "truncated shard": (truncate_file, SHARD),
    "flipped byte": (flip_byte, SHARD),
    "deleted shard": (Path.unlink, SHARD),
    "flipped byte of the manifest": (flip_byte, MANIFEST),
    "deleted manifest": (Path.unlink, MANIFEST),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_skipped(cli: CliRunner, reference_curve, stopped_at_10, tmp_path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_at_10, run)
    change, name = DAMAGES[damage]
    newest = run / "checkpoints" / "step-00000010"
    change(newest / name)
    code, output = cli.run(tmp_path / "out", *train_command(run))
    notes = [line for line in output.splitlines() if line.startswith("damaged checkpoint skipped: ")]
    assert code == 0 and len(notes) == 1 and str(newest) in notes[0] and name in notes[0]
    assert f"resumed from {run}/checkpoints/step-00000008" in output
    assert read_curve(run) == reference_curve


def test_only_damaged_checkpoints_is_an_error(cli, stopped_at_10, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_at_10, run)
    for step, (change, name) in zip((4, 8, 10), list(DAMAGES.values())[1:4], strict=True):
        change(run / "checkpoints" / f"step-{step:08d}" / name)
    before = read_tree(run)
    code, output = cli.run(tmp_path / "out", *train_command(run))
    assert code == 2 and read_tree(run) == before
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "none of its checkpoints is valid" in error and "remove them to start over" in error
