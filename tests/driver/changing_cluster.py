"""Soak: a run that follows a simulated cluster whose nodes come and go, drained and killed, from a seed.

python -m tests.driver.changing_cluster [SECONDS [SEED]]

One process then trains the same steps; losses must be the same bits. Prints the pauses, the steps lost, and the share
of the device time on live nodes in which steps were computed that count.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.driver.cli_process import curve_point
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster
from tests.json_lines import read_json_lines
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

MAX_DEVICES, MAX_NODES = 6, 4  # the first node has one and stays
MIN_INTERVAL_S, MAX_INTERVAL_S = 15.0, 45.0  # between two changes of the cluster
MAX_NOTICE_S = 3.0  # from the drain of a node until it is killed
WORDS = [
    *SMALL_OVERRIDES,
    "train.global_batch_size=12",
    "train.micro_batch_size=2",
    "train.deterministic=elastic",
    "checkpoint.interval=0",
    "lr_scheduler.name=constant",
]
FOLLOWING = ["cluster.workers=auto", "cluster.cpus_per_worker=1", "cluster.resize_interval=1"]


@dataclass(frozen=True)
class Event:
    """A change of the cluster: unix time, add, drain or lose, and the slots that are left."""

    time: float
    word: str
    slots: int


def change_cluster(cluster: TwoNodeCluster, process: subprocess.Popen[bytes], seconds: float, seed: int) -> list[Event]:
    """Add, drain and kill nodes at random times for `seconds` seconds."""
    rng, nodes, end = random.Random(seed), [1], time.time() + seconds
    events = [Event(time.time(), "start", sum(nodes))]
    while (wait_s := rng.uniform(MIN_INTERVAL_S, MAX_INTERVAL_S)) < end - time.time():
        time.sleep(wait_s)
        assert process.poll() is None, "the run has ended"
        new_node, removals = rng.choice([1, 2]), ["drain", "lose"]
        is_full = len(nodes) == MAX_NODES or sum(nodes) + new_node > MAX_DEVICES
        word = rng.choice(["add"] if len(nodes) == 1 else removals if is_full else ["add", *removals])
        nodes = [*nodes, new_node] if word == "add" else nodes[:-1]
        cluster.send(f"add {new_node}" if word == "add" else word)
        events.append(Event(time.time(), word, sum(nodes)))
        print(f"{events[-1].time - events[0].time:6.1f} s  {word:5}  {events[-1].slots} devices", flush=True)
        if word == "drain":
            time.sleep(rng.uniform(0.0, MAX_NOTICE_S))
            cluster.send("lose")
    return events


def measure(metrics: list[dict[str, Any]], incidents: list[dict[str, Any]], events: list[Event]) -> dict[str, Any]:
    """Return what the changes cost."""
    counted = {line["step"]: line for line in metrics}
    start, end = metrics[0]["time/unix"], metrics[-1]["time/unix"]
    bounds = [min(max(start, event.time), end) for event in events] + [end]
    available = sum(
        event.slots * (until - since) for event, (since, until) in zip(events, pairwise(bounds), strict=True)
    )
    used = sum(line["elastic/world_size"] * line["time/step_s"] for line in counted.values())
    growth, others = [], []
    for before, after in pairwise(metrics):
        if before["elastic/generation"] != after["elastic/generation"]:
            gaps = growth if after["elastic/world_size"] > before["elastic/world_size"] else others
            gaps.append(round(after["time/unix"] - before["time/unix"] - after["time/step_s"], 2))
    return {
        "changes of the cluster": len(events) - 1,
        "steps": len(counted),
        "steps lost": sum(incident.get("steps_lost") or 0 for incident in incidents),
        "incidents": [incident["kind"] for incident in incidents],
        "pauses at growth in s": sorted(growth),
        "pauses at losses and drains in s": sorted(others),
        "share of device time used": round(used / available, 3),
    }


def train_through_changes(directory: Path, seconds: float, seed: int) -> list[Event]:
    """Train in `directory` while the cluster changes, stop the run, and return the changes."""
    cluster, out_file = TwoNodeCluster(cpus=[1]), directory / "out"
    command = [sys.executable, "-m", "raytrain_hpc", "train", *WORDS, *FOLLOWING, *throttle(MAX_DEVICES)]
    with out_file.open("w") as out:
        process = subprocess.Popen(
            [*command, "train.steps=1000000", f"run.dir={directory}"], env=cluster.env, stdout=out, stderr=out
        )
    try:
        while not (directory / "metrics.jsonl").exists():
            assert process.poll() is None, out_file.read_text()
            time.sleep(0.1)
        events = change_cluster(cluster, process, seconds, seed)
        process.terminate()
        assert process.wait(timeout=120) == 3, out_file.read_text()
    finally:
        process.kill()
        process.wait()
        cluster.close()
    return events


def main(seconds: float, seed: int) -> None:
    directory = Path(tempfile.mkdtemp(prefix="changing-"))
    print(directory, flush=True)
    events = train_through_changes(directory, seconds, seed)
    metrics = read_json_lines(directory / "metrics.jsonl")
    for name, value in measure(metrics, read_json_lines(directory / "incidents.jsonl"), events).items():
        print(f"{name}: {value}", flush=True)
    counted = {line["step"]: line for line in metrics}
    assert sorted(counted) == list(range(1, len(counted) + 1))
    pool = WarmPool(timeout_s=3600)
    config = make_small_config(None, *WORDS, "cluster.workers=1", f"train.steps={len(counted)}")
    reference = get_step_metrics(pool.train(config)[0])
    pool.close()
    num_same = sum(curve_point(counted[step["step"]]) == curve_point(step) for step in reference)
    print(f"steps with the bits of one process: {num_same} of {len(counted)}")
    assert num_same == len(counted)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
