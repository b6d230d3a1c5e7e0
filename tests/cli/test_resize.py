"""`raytrain-hpc resize` against a driver's listener, and requests to runs that do not exist or do not run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.cli.main import main
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.mailbox import Mailbox
from raytrain_hpc.driver.resize_request import REQUEST_NAME, ResizeListener, send_resize
from raytrain_hpc.driver.worker_target import WorkerTarget
from raytrain_hpc.errors import RunDirectoryError
from raytrain_hpc.planner.layout import Batching


def make_target(*overrides: str, workers: int = 2) -> WorkerTarget:
    config = load_config(None, ["train.global_batch_size=12", *overrides])
    target = WorkerTarget(config, lambda line: None)
    target.begin(config, Batching(12, 1), workers, None)
    return target


@pytest.fixture
def target(tmp_path: Path) -> Iterator[WorkerTarget]:
    """The target of a driver that holds the lease of the directory and listens, with two workers."""
    lease = Lease.acquire(tmp_path, owner="test")
    target = make_target("cluster.min_workers=2", "cluster.max_workers=4")
    write_workers(tmp_path, 2)
    with ResizeListener(Mailbox(tmp_path), target.resize, lambda: target.value, lambda: "1 CPUs").listen():
        yield target
    lease.release()


def write_workers(directory: Path, count: int) -> None:
    Mailbox(directory).write("workers.json", json.dumps({"workers": [{}] * count}).encode())


def resize(directory: Path, workers: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["resize", str(directory), workers, *options])


def test_the_driver_is_resized(target: WorkerTarget, tmp_path: Path) -> None:
    result = resize(tmp_path, "3", "--wait", "0.5")
    assert (result.exit_code, target.value) == (0, 3), result.output
    assert result.output.splitlines() == [
        f"{tmp_path}: 3 workers wanted, 2 before; the cluster has 1 CPUs free",
        "2 workers train now; others join at a step boundary when there is room for them and they have started, "
        "and until then the run continues as it is",
    ]
    write_workers(tmp_path, 3)
    result = resize(tmp_path, "auto", "--wait", "0.5")
    assert (result.exit_code, target.value) == (0, 2), result.output
    write_workers(tmp_path, 2)
    assert resize(tmp_path, "2").output.splitlines()[1] == "2 workers train"


@pytest.mark.parametrize(
    ("workers", "problem"),
    [
        ("1", "workers=1 (resize): cluster.min_workers allows no fewer than 2"),
        ("5", "workers=5 (resize): cluster.max_workers allows no more than 4"),
        ("0", "workers='0' (command line): needs a number of at least 1, or auto"),
        ("many", "workers='many' (command line): needs a number of at least 1, or auto"),
    ],
)
def test_numbers_that_the_run_does_not_allow_are_refused(
    target: WorkerTarget, tmp_path: Path, workers: str, problem: str
) -> None:
    result = resize(tmp_path, workers)
    assert (result.exit_code, target.value) == (2, 2)
    assert result.stderr == f"error: {problem}\n"


def test_runs_that_do_not_exist_or_do_not_run_are_refused(tmp_path: Path) -> None:
    missing, idle = tmp_path / "missing", tmp_path / "idle"
    idle.mkdir()
    assert "no such run directory" in resize(missing, "3").stderr and not missing.exists()
    Lease.acquire(idle, owner="test").release()
    result = resize(idle, "3")
    assert result.exit_code == 2 and "no run is running there; start it with cluster.workers=3" in result.stderr
    assert not (idle / REQUEST_NAME).exists()


@pytest.mark.parametrize(
    ("run_dir", "reason"), [("http://a/b", "needs one of s3://"), ("~nobody-here/a", "is no user")]
)
def test_a_name_that_cannot_be_a_run_directory_is_refused(run_dir: str, reason: str) -> None:
    result = CliRunner().invoke(main, ["resize", run_dir, "3"])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert result.stderr.startswith(f"error: RUN_DIR='{run_dir}' (command line): ") and reason in result.stderr
    assert CliRunner().invoke(main, ["status", run_dir]).exit_code == 2


def test_a_request_for_an_earlier_driver_is_ignored(tmp_path: Path) -> None:
    mailbox = Mailbox(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"did not reply within 0\.2 s"):
        send_resize(mailbox, 5, timeout_s=0.2)
    target = make_target()
    listener = ResizeListener(mailbox, target.resize, lambda: target.value)
    with listener.listen():
        listener.poll()
        assert target.value == 2
        assert send_resize(mailbox, 5, timeout_s=10).target == 5
    assert target.value == 5


def test_a_fixed_number_cannot_follow_the_cluster(tmp_path: Path) -> None:
    target = make_target("cluster.workers=3")
    with pytest.raises(Exception, match="cluster.workers=3 fixes the number; give a number"):
        target.resize("auto")
