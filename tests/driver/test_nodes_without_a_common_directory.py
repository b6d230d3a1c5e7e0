"""Two nodes without a common directory: one is lost, then both, and a process elsewhere resumes from object storage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import ray

from tests.driver.cli_process import curve_point
from tests.driver.test_two_nodes import COMPARED_STEPS, ELASTIC
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.storage.bucket import BUCKET
from tests.storage.s3_server import S3Server
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        ray.__version__.startswith("2.50."),
        reason="a driver of Ray 2.50 may connect to either of two nodes of one host",
    ),
]
CHECKPOINT_LINE = rf"^checkpoint s3://{BUCKET}/runs/demo/checkpoints/step-"
WORDS = [*ELASTIC, "parallel.zero=3", "cluster.workers=4", "lr_scheduler.name=constant", "checkpoint.interval=5"]


def start(env: Mapping[str, str], cwd: Path, *words: str) -> subprocess.Popen[str]:
    cwd.mkdir()
    command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir=s3://{BUCKET}/runs/demo", *WORDS, *words]
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """Return the output up to the line that contains a regular expression; fail if the process ends before."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return "".join(lines)
    raise AssertionError(f"no line with {pattern!r} in:\n{''.join(lines)}")


def test_another_machine_continues_with_the_same_bits(
    s3: S3Server, pool: WarmPool, ray_python: Path, tmp_path: Path
) -> None:
    reference = [curve_point(metrics) for metrics in get_step_metrics(pool.train(make_small_config(None, *WORDS))[0])]
    cluster = TwoNodeCluster(python=ray_python)
    try:
        process = start(cluster.env, tmp_path / "first", *throttle(4))
        try:
            # A checkpoint that is replaced before its upload begins is skipped, so no step is awaited by its name.
            read_until(process, CHECKPOINT_LINE)
            cluster.send("lose")
            assert "on 2 of 4 workers" in read_until(process, "recovered in")
            read_until(process, CHECKPOINT_LINE)
        finally:
            process.kill()
            process.communicate()
    finally:
        cluster.close()
    process = start(os.environ | s3.environment, tmp_path / "second", "cluster.workers=0")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "resumed from s3://training/runs/demo/checkpoints/step-000000" in output, output
    lines = [json.loads(line) for line in s3.read("runs/demo/metrics.jsonl").splitlines()]
    curve = {line["step"]: curve_point(line) for line in lines}
    assert [curve[step] for step in range(1, COMPARED_STEPS + 1)] == reference
    assert {line["elastic/world_size"] for line in lines} == {1, 2, 4}
    assert not list((tmp_path / "first").iterdir()) + list((tmp_path / "second").iterdir()), "no file outside the store"
