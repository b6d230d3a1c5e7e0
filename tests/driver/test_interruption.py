"""A run that is stopped, killed or damaged ends with the numbers of one that was left alone. One rank, no Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from tests.driver.cli_process import WORDS, Lives, count, joined, signal_after

KILLED_IN_A_SHARD = """
import os, signal
from raytrain_hpc.checkpoint import safetensors_writer
real = safetensors_writer._write
def torn(path, header, blocks):
    if "step-00000012" not in str(path):
        return real(path, header, blocks)
    with path.open("wb") as file:
        file.write(header[:100])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
safetensors_writer._write = torn
"""
KILLED_BEFORE_THE_RENAME = """
import os, signal
from raytrain_hpc.checkpoint.store import CheckpointStore
real = CheckpointStore._rename
def rename(self, staging, final):
    if final.name == "step-00000012":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, staging, final)
CheckpointStore._rename = rename
"""

STOP_REQUESTED_AFTER_9 = """
import os, signal
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def take(self, metrics):
    real(self, metrics)
    if metrics["step"] == 9:
        os.kill(os.getpid(), signal.SIGTERM)
RunRecorder._handle_step = take
"""


def command(run_dir: Path, *words: str) -> list[str]:
    return ["train", *WORDS, f"run.dir={run_dir}", *words]


def tree(root: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


def test_sigterm_at_any_step_then_the_same_command_again(lives: Lives, undisturbed, tmp_path) -> None:
    draw, run, seen = random.Random(0), tmp_path / "run", 0
    for _ in range(3):
        patch = signal_after(seen + draw.randint(1, 4), signal.SIGTERM, draw.uniform(0, 0.02))
        assert lives.run(tmp_path / "out", *command(run), patch=patch)[0] == 3
        step = json.loads((run / "result.json").read_text())["steps"]
        assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
        assert seen < step < 24 and count(run) == step, "no step is lost and none is run again"
        seen = step
    code, said = lives.run(tmp_path / "out", *command(run))
    assert code == 0 and f"resumed from {run}/checkpoints/step-{seen:08d}" in said
    assert joined(run) == undisturbed


def signal_in_evaluation(batch: int) -> str:
    """A patch: SIGTERM comes before this batch of all that the life evaluates."""
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


def evaluations(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val/loss"] for line in lines if "val/loss" in line}


def test_an_evaluation_gives_way_to_a_stop_and_is_made_up_for(lives: Lives, undisturbed, tmp_path) -> None:
    words = ["train.eval_every=6", "train.eval_samples=40"]  # 20 batches, four times
    whole, run, out = tmp_path / "whole", tmp_path / "run", tmp_path / "out"
    assert lives.run(out, *command(whole, *words))[0] == 0
    assert sorted(evaluations(whole)) == [6, 12, 18, 24]
    # In the evaluation of step 12, then in the last one: the next life begins with 12's.
    for batch, step in ((20 + 13, 12), (20 + 20 + 5, 24)):
        assert lives.run(out, *command(run, *words), patch=signal_in_evaluation(batch))[0] == 3
        assert json.loads((run / "result.json").read_text())["steps"] == step
        assert (run / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
        assert step not in evaluations(run)
    assert lives.run(out, *command(run, *words))[0] == 0
    assert evaluations(run) == evaluations(whole) and joined(run) == undisturbed
    result = json.loads((run / "result.json").read_text())
    assert result["val/loss"] == evaluations(run)[24] and result["checkpoint"].endswith("step-00000024")
    code, said = lives.run(out, *command(run, *words))
    assert code == 0 and "already trained" in said
    assert count(run) == 26, "the lines of steps 12 and 24 came again with their evaluation, and nothing else"


def test_sigkill_of_the_driver_goes_on_from_the_last_checkpoint(lives: Lives, undisturbed, tmp_path) -> None:
    run = tmp_path / "run"
    patch = signal_after(10, signal.SIGKILL, 0.01)
    assert lives.run(tmp_path / "out", *command(run), patch=patch)[0] == -signal.SIGKILL
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "train/lo')  # what a kill within the write of a line leaves
    code, said = lives.run(tmp_path / "out", *command(run))
    assert code == 0 and "resumed from" in said
    assert joined(run) == undisturbed and count(run) > 24


def test_a_second_driver_is_refused_while_the_first_one_lives(lives: Lives, undisturbed, tmp_path) -> None:
    run = tmp_path / "run"
    first = lives.start(tmp_path / "out", *command(run), patch=signal_after(3, signal.SIGSTOP))
    first.until_stopped()  # alive, and quiet for as long as this test looks at it
    before = tree(run)
    code, said = lives.run(tmp_path / "second", *command(run))
    assert code == 2 and said.splitlines() == [line for line in said.splitlines() if line.startswith("error: ")]
    assert f"pid {first.pid}) is running in it; stop it or choose another run.dir" in said
    assert tree(run) == before
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0 and joined(run) == undisturbed


@pytest.mark.parametrize(
    "patch", [KILLED_IN_A_SHARD, KILLED_BEFORE_THE_RENAME], ids=["in a shard", "before the rename"]
)
def test_kill_during_a_checkpoint_write(lives: Lives, undisturbed, tmp_path, patch: str) -> None:
    run = tmp_path / "run"
    assert lives.run(tmp_path / "out", *command(run), patch=patch)[0] == -signal.SIGKILL
    assert any(path.name.startswith(".staging-step-00000012") for path in (run / "checkpoints").iterdir())
    code, said = lives.run(tmp_path / "out", *command(run))
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000008" in said and "damaged" not in said
    assert joined(run) == undisturbed
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


@pytest.fixture(scope="module")
def stopped_at_10(lives: Lives, tmp_path_factory) -> Path:
    """A run with checkpoints of the steps 4, 8 and 10."""
    directory = tmp_path_factory.mktemp("stopped")
    patch = STOP_REQUESTED_AFTER_9
    assert lives.run(directory / "out", *command(directory / "run"), patch=patch)[0] == 3
    assert sorted(p.name[-2:] for p in (directory / "run" / "checkpoints").iterdir()) == ["04", "08", "10"]
    return directory / "run"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SHARD, MANIFEST = "rank-00000.safetensors", "manifest.json"
DAMAGES = {
    "truncated shard": (truncate, SHARD),
    "flipped byte": (flip, SHARD),
    "deleted shard": (Path.unlink, SHARD),
    "flipped byte of the manifest": (flip, MANIFEST),
    "deleted manifest": (Path.unlink, MANIFEST),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(lives: Lives, undisturbed, stopped_at_10, tmp_path, damage: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_at_10, run)
    change, name = DAMAGES[damage]
    newest = run / "checkpoints" / "step-00000010"
    change(newest / name)
    code, said = lives.run(tmp_path / "out", *command(run))
    notes = [line for line in said.splitlines() if line.startswith("damaged checkpoint passed over: ")]
    assert code == 0 and len(notes) == 1 and str(newest) in notes[0] and name in notes[0]
    assert f"resumed from {run}/checkpoints/step-00000008" in said
    assert joined(run) == undisturbed


def test_nothing_but_damaged_checkpoints_is_an_error_and_nothing_is_deleted(lives, stopped_at_10, tmp_path) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_at_10, run)
    for step, (change, name) in zip((4, 8, 10), list(DAMAGES.values())[1:4], strict=True):
        change(run / "checkpoints" / f"step-{step:08d}" / name)
    before = tree(run)
    code, said = lives.run(tmp_path / "out", *command(run))
    assert code == 2 and tree(run) == before
    (error,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "none of its checkpoints is valid" in error and "remove them to start over" in error
