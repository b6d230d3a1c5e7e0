"""A full disk raises an alarm, and the run continues; what could not be written is written when there is space."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raytrain_hpc.observability.metric_writers import JsonlWriter, TensorBoardWriter
from tests.driver.cli_process import WORDS, CliRunner, read_curve, signal_after

# The disk is full from step 6 on; if `freed` is a step, it has space again after that step.
BALLAST = """
import os, pathlib
from raytrain_hpc.driver.run_recorder import RunRecorder
ballast, freed = pathlib.Path({ballast!r}), {freed}
real = RunRecorder._handle_step
def fill():
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 12)):
                pass
        except OSError:
            pass
def handle_step(self, metrics):
    if metrics["step"] == 6:
        fill()
    real(self, metrics)
    if metrics["step"] == freed:
        ballast.unlink()
RunRecorder._handle_step = handle_step
"""
SYNCHRONOUS = "checkpoint.async=false"  # the checkpoint of step 4 is published before the disk is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def find_alarms(output: str) -> list[str]:
    assert "Traceback" not in output
    return [line for line in output.splitlines() if line.startswith("alarm: ")]


def test_temporarily_full_disk(cli: CliRunner, reference_curve, small_disk: Path, tmp_path) -> None:
    run = small_disk / "run"
    command = ["train", *WORDS, f"run.dir={run}", "logging.tensorboard=true", SYNCHRONOUS]
    patch = BALLAST.format(ballast=str(small_disk / "ballast"), freed=18)
    code, output = cli.run(tmp_path / "out", *command, patch=patch)
    assert code == 0
    alarm_lines = find_alarms(output)
    assert sum("metrics.jsonl" in line for line in alarm_lines) == 1, "once, not once per step"
    assert sum(f"{run}/tb/" in line for line in alarm_lines) == 1
    for step in (8, 12, 16):
        assert sum(f"checkpoint of step {step} not saved: rank 0: " in line for line in alarm_lines) == 1
    assert len(alarm_lines) == 5 and all("No space left on device" in line for line in alarm_lines)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000020",
        "step-00000024",
    ]
    assert read_curve(run) == reference_curve, "no line is lost or incomplete"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 24
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, (loss, _, _) in enumerate(reference_curve, 1)
    ]


def test_permanently_full_disk_does_not_stop_the_run(cli, reference_curve, small_disk: Path, tmp_path) -> None:
    run = small_disk / "run"
    command = ["train", *WORDS, f"run.dir={run}", SYNCHRONOUS]
    patch = BALLAST.format(ballast=str(small_disk / "ballast"), freed=None)
    code, output = cli.run(tmp_path / "out", *command, patch=patch)
    assert code == 0 and "step 24/24" in output
    alarm_lines = find_alarms(output)
    assert any("result.json cannot be written" in line for line in alarm_lines)
    assert any("lacks its last" in line for line in alarm_lines)
    before = (run / "metrics.jsonl").read_text()
    code, output = cli.run(tmp_path / "out", *command)
    assert code == 2, output
    assert output.startswith(
        f"error: run.dir={run}: cannot be written: No space left on device; choose another run.dir"
    )
    assert (run / "metrics.jsonl").read_text() == before
    (small_disk / "ballast").unlink()
    code, output = cli.run(tmp_path / "out", *command)
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000004" in output and not find_alarms(output)
    assert read_curve(run) == reference_curve
    assert json.loads((run / "result.json").read_text())["checkpoint"].endswith("step-00000024")


def test_unwritable_checkpoints_do_not_stop_the_run(cli: CliRunner, reference_curve, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    code, output = cli.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}")
    alarm_lines = find_alarms(output)
    assert code == 0 and len(alarm_lines) == 6 and all("checkpoint of step" in line for line in alarm_lines)
    assert read_curve(run) == reference_curve
    assert json.loads((run / "result.json").read_text())["checkpoint"] is None


def test_stop_without_a_checkpoint_fails(cli: CliRunner, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    code, output = cli.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}", patch=signal_after(5, signal.SIGTERM))
    assert code == 4
    assert output.splitlines()[-1].startswith("error: stopped, but the last checkpoint was not saved: ")


class LimitedDisk:
    """A disk with space for `room` bytes, whose last write is partial. None: unlimited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.room is None:
            return self._real(descriptor, data, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._real(descriptor, data[: self.room], offset)
        self.room -= written
        return written


def test_metrics_lines_are_complete_and_written_later(tmp_path, monkeypatch) -> None:
    path, alarm_lines = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n{"step": 2, "tra')
    disk, sink = LimitedDisk(monkeypatch), JsonlWriter(path, alarm_lines.append)
    sink.write({"step": 2})
    for step, disk.room in ((3, 5), (4, 17), (5, 0)):
        sink.write({"step": step})
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
        with pytest.raises(OSError, match="No space left"):
            sink.sync()
    assert len(alarm_lines) == 1 and str(path) in alarm_lines[0]
    disk.room = None
    sink.write({"step": 6})
    sink.sync()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    disk.room = 0
    sink.write({"step": 7})
    assert len(alarm_lines) == 2, "a second failure raises a second alarm"
    sink.close()
    assert "lacks its last 1 records" in alarm_lines[2]
    assert len(path.read_text().splitlines()) == 6


def test_tensorboard_events_are_written_later_and_purged_on_restart(tmp_path, monkeypatch) -> None:
    alarm_lines: list[str] = []
    disk, sink = LimitedDisk(monkeypatch), TensorBoardWriter(tmp_path / "tb", 0, alarm_lines.append)
    for step, disk.room in ((1, None), (2, 9), (3, 0), (4, None)):
        sink.write({"step": step, "time/unix": 1.0, "train/loss": step / 2, "throughput/mfu": None})
    sink.discard_steps_after(2)
    sink.write({"step": 3, "time/unix": 1.0, "train/loss": 7.0})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["time/unix", "train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, 7.0)]
    assert len(alarm_lines) == 1
