"""Soak of a run in object storage with random faults: python -m tests.driver.storage_soak --minutes 30 --seed 1

A run saves every ten steps to an S3 server of which a share of requests fails, and throttles everything for a while
now and then. Its driver is killed at random and started again; shards of old and new checkpoints are damaged at random
while no driver runs. Checked: each resume starts from a checkpoint that was published and not damaged, none that is
newer than it was published undamaged, losses are those of a run without faults, and the memory of the driver is flat.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from werkzeug.wrappers import Response

from tests.driver.cli_process import curve_point
from tests.storage.bucket import BUCKET
from tests.storage.s3_server import RandomFaults, Request, S3Server, make_slow_down_response
from tests.warm_pool import SMALL_OVERRIDES

URL = f"s3://{BUCKET}/runs/soak"
WORDS = [*SMALL_OVERRIDES, "train.steps=1000000", "checkpoint.interval=10", "cluster.workers=0", "eval.interval=0"]
WORDS += ["lr_scheduler.name=constant", "logging.interval=100000", "logging.tensorboard=true"]
MANIFEST = "runs/soak/checkpoints/step-{:08d}/manifest.json"
_PUBLISHED = re.compile(rf"checkpoint {URL}/checkpoints/step-(\d+)")
_RESUMED = re.compile(rf"resumed from {URL}/checkpoints/step-(\d+)")


class Storage:
    """Faults of the server: a share of all requests, and outages of some seconds."""

    def __init__(self, draw: random.Random) -> None:
        self._faults, self._draw, self._outage_end = RandomFaults(0.2, draw.randrange(1 << 30)), draw, 0.0

    def __call__(self, request: Request, forward: Any) -> Response:
        """Answer one request."""
        now = time.monotonic()
        if now > self._outage_end + 20 and self._draw.random() < 0.002:
            self._outage_end = now + self._draw.uniform(1, 8)
        return make_slow_down_response() if now < self._outage_end else self._faults(request, forward)

    @property
    def num_faults(self) -> int:
        """The number of requests that have failed apart from outages."""
        return self._faults.count


class Driver:
    """One life of the driver: its output, the steps that it published, and its memory over time."""

    def __init__(self, environment: dict[str, str], words: list[str]) -> None:
        command = [sys.executable, "-m", "raytrain_hpc", "train", f"run.dir={URL}", *WORDS, *words]
        self.process = subprocess.Popen(
            command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)

    def end(self, number: int) -> str:
        """Send a signal, wait for the end, and return the output."""
        self.process.send_signal(number)
        self.process.wait(120)
        self._thread.join()
        return "".join(self.lines)


def main() -> None:
    """Run the soak, and print what happened as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw, server = random.Random(arguments.seed), S3Server()
    storage = server.intercept = Storage(draw)
    published: set[int] = set()
    damaged: set[int] = set()
    totals = {"lives": 0, "kills": 0, "stops": 0, "published": 0, "damaged": 0, "alarms": 0}
    memory: list[float] = []
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        driver = Driver(server.environment, [])
        life_end = time.monotonic() + draw.uniform(15, 120)
        while time.monotonic() < min(life_end, end) and driver.process.poll() is None:
            time.sleep(1)
            memory.append(psutil.Process(driver.process.pid).memory_info().rss / 2**20)
        assert driver.process.poll() is None, "".join(driver.lines)
        is_kill = draw.random() < 0.7
        output = driver.end(signal.SIGKILL if is_kill else signal.SIGTERM)
        check_resume(output, published, damaged)
        assert "Traceback" not in output, output
        server.intercept = None
        published |= {int(step) for step in _PUBLISHED.findall(output)} | set(list_steps(server))
        totals["lives"] += 1
        totals["kills" if is_kill else "stops"] += 1
        totals["published"] += len(_PUBLISHED.findall(output))
        totals["alarms"] += output.count("alarm: ")
        damaged |= damage_some(server, draw)
        server.intercept = storage
    server.intercept = None
    totals["damaged"] = len(damaged)
    lines = read_metrics(server)
    steps = {line["step"]: line for line in lines}
    assert sorted(steps) == list(range(1, max(steps) + 1)), "every step is recorded"
    compare_with_undisturbed(steps)
    print(
        json.dumps(
            totals
            | {"steps": max(steps), "failed_requests": storage.num_faults, "requests": len(server.requests)}
            | {
                "memory_mib_first_quarter": summarize(memory[: len(memory) // 4]),
                "memory_mib_last_quarter": summarize(memory[-len(memory) // 4 :]),
            }
        )
    )


def check_resume(output: str, published: set[int], damaged: set[int]) -> None:
    """Assert that a driver has resumed from the newest checkpoint that is not damaged.

    The rank that reads a checkpoint finds changed bits; the driver then names it, and resumes from an earlier one.
    """
    good = published - damaged
    steps = [int(step) for step in _RESUMED.findall(output)]
    if not steps:
        assert not good or "resumed" not in output, output
        return
    for skipped in steps[:-1]:
        assert skipped in damaged and f"step-{skipped:08d}" in output.partition("damaged checkpoint skipped")[2], output
    step = steps[-1]
    assert step in good, f"{step} was damaged or never published"
    newer = [other for other in good if other > step]
    assert not newer, f"resumed from {step} although {newer} were published"


def list_steps(server: S3Server) -> list[int]:
    """Return the steps with a manifest."""
    keys = server.list_keys("runs/soak/checkpoints/")
    return [int(key.split("/")[3].removeprefix("step-")) for key in keys if key.endswith("manifest.json")]


def damage_some(server: S3Server, draw: random.Random) -> set[int]:
    """Damage the newest checkpoint now and then, as long as an older one remains; return its step."""
    steps = sorted(list_steps(server))
    if len(steps) < 2 or draw.random() < 0.6:
        return set()
    (key,) = [
        key for key in server.list_keys(f"runs/soak/checkpoints/step-{steps[-1]:08d}/") if key.endswith(".safetensors")
    ][:1]
    content = bytearray(server.read(key))
    kind = draw.choice(["truncated", "flipped", "deleted"])
    if kind == "deleted":
        server.delete(key)
    elif kind == "truncated":
        server.write(key, bytes(content[: draw.randrange(len(content))]))
    else:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        server.write(key, bytes(content))
    return {steps[-1]}


def read_metrics(server: S3Server) -> list[dict[str, Any]]:
    """Return all lines of metrics, parts first."""
    keys = sorted(key for key in server.list_keys("runs/soak/metrics-"))
    text = b"".join(server.read(key) for key in [*keys, "runs/soak/metrics.jsonl"])
    return [json.loads(line) for line in text.splitlines()]


def compare_with_undisturbed(steps: dict[int, dict[str, Any]]) -> None:
    """Assert that the curve is that of a run in a local directory without faults."""
    with tempfile.TemporaryDirectory() as name:
        words = [*WORDS, f"run.dir={name}/run", f"train.steps={max(steps)}", "checkpoint.interval=0"]
        subprocess.run([sys.executable, "-m", "raytrain_hpc", "train", *words], check=True, capture_output=True)
        lines = [json.loads(line) for line in (Path(name) / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [curve_point(line) for line in lines] == [curve_point(steps[step]) for step in sorted(steps)]


def summarize(values: list[float]) -> list[int]:
    """Return median and maximum."""
    ordered = sorted(values)
    return [round(ordered[len(ordered) // 2]), round(ordered[-1])]


if __name__ == "__main__":
    main()
