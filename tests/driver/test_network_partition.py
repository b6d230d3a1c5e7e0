"""The network between two nodes is cut, and nobody is told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.driver.cli_process import curve, joined
from tests.driver.network_namespaces import Apart, allowed
from tests.driver.test_two_nodes import ELASTIC, FAR, until
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not allowed(), reason="needs the right to make network namespaces"),
]


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.close()


def test_the_side_of_the_driver_goes_on_and_the_other_ends(apart: Apart, pool: WarmPool, tmp_path: Path) -> None:
    """Stages on both sides: no connection breaks by itself, and what is there is known here as copies."""
    words, run_dir = [*ELASTIC, "cluster.workers=4", "parallel.pp=2"], tmp_path / "run"
    undisturbed = get_step_metrics(pool.train(make_small_config(None, *words))[0])
    command = apart.inside(sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={run_dir}", *words)
    process = subprocess.Popen(
        command, env=apart.env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda found: len(found) >= 12, run_dir, process)
        before = json.loads((run_dir / "workers.json").read_text())["workers"]
        gone = apart.strike(before)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, output
    (incident,) = [json.loads(line) for line in (run_dir / "incidents.jsonl").read_text().splitlines()]
    assert len(gone) == 2 and (incident["kind"], incident["ranks"]) == ("node lost", gone), output
    assert (incident["world"], incident["world_after"]) == (4, 2) and incident["steps_lost"] <= 1
    assert joined(run_dir, FAR) == [curve(metrics) for metrics in undisturbed]
    left = [psutil.Process(one["pid"]) for one in before if one["rank"] in gone and psutil.pid_exists(one["pid"])]
    written = files(run_dir)
    apart.heal()
    assert not psutil.wait_procs(left, timeout=60)[1], "what was given up on ends, and joins nothing"
    assert files(run_dir) == written


def files(directory: Path) -> dict[str, float]:
    """When each file was last written."""
    time.sleep(0.5)
    return {str(path): path.stat().st_mtime for path in directory.rglob("*") if path.is_file()}
