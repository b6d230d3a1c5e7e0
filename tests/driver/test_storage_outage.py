"""The storage of a run goes away in the middle of it, with errors, without a word, or as if it had never been there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.cli_process import WORDS, Lives, joined
from tests.driver.loop_filesystem import Disk, NoDisk, mounted

WORDS = [*WORDS, "observe.tensorboard=true", "checkpoint.async=false"]
# What is done to it after step 6 and after step 18: in the driver, so that it comes between the same steps every time.
PATCH = """
from pathlib import Path
from raytrain_hpc.driver.run_recorder import RunRecorder
from tests.driver.loop_filesystem import Disk
disk = Disk(Path({path!r}), Path({image!r}))
strike, mend = {{
    "errors": (disk.fail, disk.mend),
    "absent": (
        lambda: (disk.path / "run").rename(disk.path / "away"), lambda: (disk.path / "away").rename(disk.path / "run")
    ),
    "silence": (lambda: disk.freeze(3.0), lambda: None),
}}[{how!r}]
real = RunRecorder._handle_step
def take(self, metrics):
    if metrics["step"] == 7:
        strike()
    if metrics["step"] == 19:
        mend()
    real(self, metrics)
RunRecorder._handle_step = take
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with mounted(tmp_path / "disk") as made:
            yield made
    except NoDisk as error:
        pytest.skip(f"may not mount a file system here: {error}")


@pytest.mark.parametrize("how", ["errors", "absent", "silence"])
def test_storage_that_is_gone_for_a_while(lives: Lives, undisturbed, disk: Disk, tmp_path: Path, how: str) -> None:
    run = disk.path / "run"
    patch = PATCH.format(path=str(disk.path), image=str(disk.image), how=how)
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
    assert sorted(path.name for path in disk.path.iterdir()) == ["lost+found", "run"], "nothing was made in its place"
