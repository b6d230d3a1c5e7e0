"""A disk that refuses is an alarm: the run goes on, and what could not be written is written when there is room."""

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
from tests.driver.cli_process import WORDS, Lives, joined, signal_after

# The disk is full from step 6 on and, where `freed` is a step, has room again after that one.
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
def take(self, metrics):
    if metrics["step"] == 6:
        fill()
    real(self, metrics)
    if metrics["step"] == freed:
        ballast.unlink()
RunRecorder._handle_step = take
"""
WAIT_FOR_THE_DISK = "checkpoint.async=false"  # so that the checkpoint of step 4 is there when the disk fills up


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


def alarms(said: str) -> list[str]:
    assert "Traceback" not in said
    return [line for line in said.splitlines() if line.startswith("alarm: ")]


def test_a_disk_that_is_full_for_a_while(lives: Lives, undisturbed, small_disk: Path, tmp_path) -> None:
    run = small_disk / "run"
    command = ["train", *WORDS, f"run.dir={run}", "observe.tensorboard=true", WAIT_FOR_THE_DISK]
    patch = BALLAST.format(ballast=str(small_disk / "ballast"), freed=18)
    code, said = lives.run(tmp_path / "out", *command, patch=patch)
    assert code == 0
    told = alarms(said)
    assert sum("metrics.jsonl" in line for line in told) == 1, "once, and not once a step"
    assert sum(f"{run}/tb/" in line for line in told) == 1
    for step in (8, 12, 16):
        assert sum(f"checkpoint of step {step} not saved: rank 0: " in line for line in told) == 1
    assert len(told) == 5 and all("No space left on device" in line for line in told)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-00000004",
        "step-00000020",
        "step-00000024",
    ]
    assert joined(run) == undisturbed, "no line is lost and none is torn"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 24
    events = EventAccumulator(str(run / "tb"))
    events.Reload()
    assert [(s.step, s.value) for s in events.Scalars("train/loss")] == [
        (step, pytest.approx(loss)) for step, (loss, _, _) in enumerate(undisturbed, 1)
    ]


def test_a_disk_that_stays_full_costs_the_end_of_the_run_no_more(
    lives, undisturbed, small_disk: Path, tmp_path
) -> None:
    run = small_disk / "run"
    command = ["train", *WORDS, f"run.dir={run}", WAIT_FOR_THE_DISK]
    patch = BALLAST.format(ballast=str(small_disk / "ballast"), freed=None)
    code, said = lives.run(tmp_path / "out", *command, patch=patch)
    assert code == 0 and "step 24/24" in said
    told = alarms(said)
    assert any("result.json cannot be written" in line for line in told)
    assert any("lacks its last" in line for line in told)
    before = (run / "metrics.jsonl").read_text()
    code, said = lives.run(tmp_path / "out", *command)
    assert code == 2, said
    assert said.startswith(f"error: run.dir={run}: cannot be written: No space left on device; choose another run.dir")
    assert (run / "metrics.jsonl").read_text() == before
    (small_disk / "ballast").unlink()
    code, said = lives.run(tmp_path / "out", *command)
    assert code == 0 and f"resumed from {run}/checkpoints/step-00000004" in said and not alarms(said)
    assert joined(run) == undisturbed
    assert json.loads((run / "result.json").read_text())["checkpoint"].endswith("step-00000024")


def test_checkpoints_that_cannot_be_written_anywhere(lives: Lives, undisturbed, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    code, said = lives.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}")
    told = alarms(said)
    assert code == 0 and len(told) == 6 and all("checkpoint of step" in line for line in told)
    assert joined(run) == undisturbed
    assert json.loads((run / "result.json").read_text())["checkpoint"] is None


def test_a_stop_that_cannot_be_saved_is_no_success(lives: Lives, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    code, said = lives.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}", patch=signal_after(5, signal.SIGTERM))
    assert code == 4
    assert said.splitlines()[-1].startswith("error: stopped without a checkpoint: ")


class Disk:
    """Stands in for a disk with room for so many bytes, whose last write is a part of what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room: int | None = None
        self._real = os.pwrite
        monkeypatch.setattr(os, "pwrite", self.pwrite)

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        if self.room is None:
            return self._real(descriptor, data, offset)
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = self._real(descriptor, data[: self.room], offset)
        self.room -= done
        return done


def test_lines_are_whole_or_absent_and_come_later(tmp_path, monkeypatch) -> None:
    path, told = tmp_path / "metrics.jsonl", []
    path.write_text('{"step": 1}\n{"step": 2, "tra')
    disk, sink = Disk(monkeypatch), JsonlWriter(path, told.append)
    sink.write({"step": 2})
    for step, disk.room in ((3, 5), (4, 17), (5, 0)):
        sink.write({"step": step})
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
        with pytest.raises(OSError, match="No space left"):
            sink.sync()
    assert len(told) == 1 and str(path) in told[0]
    disk.room = None
    sink.write({"step": 6})
    sink.sync()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
    disk.room = 0
    sink.write({"step": 7})
    assert len(told) == 2, "a second time is another alarm"
    sink.close()
    assert "lacks its last 1 records" in told[2]
    assert len(path.read_text().splitlines()) == 6


def test_events_come_later_too_and_a_restart_purges(tmp_path, monkeypatch) -> None:
    told: list[str] = []
    disk, sink = Disk(monkeypatch), TensorBoardWriter(tmp_path / "tb", 0, told.append)
    for step, disk.room in ((1, None), (2, 9), (3, 0), (4, None)):
        sink.write({"step": step, "time/unix": 1.0, "train/loss": step / 2, "throughput/mfu": None})
    sink.discard_steps_after(2)
    sink.write({"step": 3, "time/unix": 1.0, "train/loss": 7.0})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["time/unix", "train/loss"]
    assert [(s.step, s.value) for s in events.Scalars("train/loss")] == [(1, 0.5), (2, 1.0), (3, 7.0)]
    assert len(told) == 1
