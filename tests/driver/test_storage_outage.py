"""The storage of a run becomes unavailable for a while: it fails, blocks, or is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.cli_process import WORDS, CliRunner, read_curve
from tests.driver.loop_filesystem import Disk, DiskUnavailableError, mount_disk

WORDS = [*WORDS, "logging.tensorboard=true", "checkpoint.async=false"]
# Begin the outage after step 6 and end it after step 18: in the driver, so that both always fall between these steps.
PATCH = """
import time
from pathlib import Path
from raytrain_hpc.driver.run_recorder import RunRecorder
from tests.driver.loop_filesystem import Disk
disk = Disk(Path({path!r}), Path({image!r}))
begin, end = {{
    "errors": (disk.fail, disk.repair),
    "absent": (
        lambda: (disk.path / "run").rename(disk.path / "away"), lambda: (disk.path / "away").rename(disk.path / "run")
    ),
    "silence": (lambda: disk.freeze(3.0), lambda: None),
}}[{outage!r}]
real = RunRecorder._handle_step
def handle_step(self, metrics):
    if metrics["step"] == 7:
        while not (disk.path / "run" / "checkpoints" / "step-00000004").exists():  # published in another thread
            time.sleep(0.01)
        begin()
    if metrics["step"] == 19:
        end()
    real(self, metrics)
RunRecorder._handle_step = handle_step
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with mount_disk(tmp_path / "disk") as mounted_disk:
            yield mounted_disk
    except DiskUnavailableError as error:
        pytest.skip(f"may not mount a file system here: {error}")


@pytest.mark.parametrize("outage", ["errors", "absent", "silence"])
def test_temporary_storage_outage(cli: CliRunner, reference_curve, disk: Disk, tmp_path: Path, outage: str) -> None:
    run = disk.path / "run"
    patch = PATCH.format(path=str(disk.path), image=str(disk.image), outage=outage)
    code, output = cli.run(tmp_path / "out", "train", *WORDS, f"run.dir={run}", patch=patch)
    assert code == 0 and "Traceback" not in output, output
    alarms = [line for line in output.splitlines() if line.startswith("alarm: ")]
    saved = sorted(int(path.name[-8:]) for path in (run / "checkpoints").iterdir())
    if outage == "silence":  # writes only take longer
        assert not alarms and saved == [16, 20, 24]
    else:
        assert saved == [4, 20, 24], output
        for step in (8, 12, 16):
            assert sum(f"checkpoint of step {step} not saved" in line for line in alarms) == 1, output
    assert read_curve(run) == reference_curve, "no line is lost or incomplete"
    assert sorted(path.name for path in disk.path.iterdir()) == ["lost+found", "run"], (
        "the run directory was not created again"
    )
