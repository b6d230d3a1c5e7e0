"""The storage of a run goes away in the middle of it, with errors, without a word, or as if it had never been there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.lives import WORDS, Lives, joined

WORDS = [*WORDS, "observe.tensorboard=true", "checkpoint.async=false"]
# What is done to it after step 6 and after step 18: in the driver, so that it comes between the same steps every time.
PATCH = """
import fcntl, os, struct, subprocess, threading, time
from raytrain_hpc.driver.recorder import RunRecorder
disk, image, how = {disk!r}, {image!r}, {how!r}
def strike():
    if how == "errors":  # EXT4_IOC_SHUTDOWN: from then on every access fails, of open files too
        descriptor = os.open(disk, os.O_RDONLY)
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack("I", 0))
        os.close(descriptor)
    elif how == "absent":
        os.rename(disk + "/run", disk + "/away")
    else:
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        threading.Timer(3.0, lambda: subprocess.run(["fsfreeze", "-u", disk], check=True)).start()
def mend():
    if how == "errors":
        subprocess.run(["umount", disk], check=True)
        subprocess.run(["mount", "-o", "loop", image, disk], check=True)
    elif how == "absent":
        os.rename(disk + "/away", disk + "/run")
real = RunRecorder._take_step
def take(self, metrics):
    if metrics["step"] == 7:
        strike()
    if metrics["step"] == 19:
        mend()
    real(self, metrics)
RunRecorder._take_step = take
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A file system of its own, and the file that it is in."""
    mounted, image = tmp_path / "disk", tmp_path / "image"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = [["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, mounted]]
    for command in made:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"may not mount a file system here: {done.stderr.strip()}")
    yield mounted, image
    subprocess.run(["umount", "-l", mounted], check=True)


@pytest.mark.parametrize("how", ["errors", "absent", "silence"])
def test_storage_that_is_gone_for_a_while(lives: Lives, undisturbed, disk, tmp_path: Path, how: str) -> None:
    mounted, image = disk
    run = mounted / "run"
    patch = PATCH.format(disk=str(mounted), image=str(image), how=how)
    code, said = lives.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}", patch=patch)
    assert code == 0 and "Traceback" not in said, said
    alarms = [line for line in said.splitlines() if line.startswith("alarm: ")]
    saved = sorted(int(path.name[-8:]) for path in (run / "checkpoints").iterdir())
    if how == "silence":  # it only takes longer
        assert not alarms and saved == [16, 20, 24]
    else:
        assert saved == [4, 20, 24], said
        for step in (8, 12, 16):
            assert sum(f"checkpoint of step {step} not saved" in line for line in alarms) == 1, said
    assert joined(run) == undisturbed, "no line is lost and none is torn"
    assert sorted(path.name for path in mounted.iterdir()) == ["lost+found", "run"], "nothing was made in its place"
