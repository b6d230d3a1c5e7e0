"""The fault matrix: every fault three times against real ranks, and what it cost. `python -m tests.driver.faults`

Each row is a run of its own with faults on purpose (`fault.inject`), or killed from outside. Its losses and last
weights are compared with those of the run without a fault, bit for bit. Words choose rows, run once; without any,
docs/faults.md is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import raytrain_hpc as rt
from tests.pool import small

STEPS, ROUNDS = 80, 3
WORDS = [
    "model.dropout=0.1",
    f"train.steps={STEPS}",
    "train.micro_batch=1",
    "train.global_batch=12",
    "train.deterministic=elastic",
    "checkpoint.every=20",
    "data.engine=local",
    "fault.max_failures=5",
]
TABLE = Path(__file__).parents[2] / "docs" / "faults.md"


@dataclass(frozen=True)
class Fault:
    """A row. `expected`: (kind, rank) of each incident; `targets`: seconds to detection, and from there to a step.

    Of several that die at once the lowest rank names the incident, and all are in it.
    """

    name: str
    expected: tuple[tuple[str, int], ...]
    targets: tuple[float, float]
    inject: tuple[tuple[str, int, int], ...] = ()  # kind, rank, step
    workers: int = 3
    words: tuple[str, ...] = ()
    outside: Callable[[Path], None] | None = None


@dataclass
class Cost:
    """What a row cost: seconds from the fault to its detection, from there to the next step; steps run again."""

    detected_s: list[float] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    steps_lost: int = 0
    same: bool = True


def kill_one_of_the_next_generation(run_dir: Path) -> None:
    """As soon as the ranks of a second generation are known."""
    until(lambda: workers(run_dir)[0] == 2, 0.001)
    os.kill(workers(run_dir)[1][0], signal.SIGKILL)


def kill_all(run_dir: Path) -> None:
    until(lambda: steps_of(run_dir) >= 10, 0.01)
    _stamp(run_dir)
    for pid in workers(run_dir)[1]:
        os.kill(pid, signal.SIGKILL)


FAULTS = (
    Fault("SIGKILL of a rank before its all-reduce", (("died", 1),), (0.3, 0.5), (("kill", 1, 30),)),
    Fault("the same, a warm spare", (("died", 1),), (0.3, 0.5), (("kill", 1, 30),), words=("cluster.spares=1",)),
    Fault("SIGKILL of rank 0", (("died", 0),), (0.3, 0.5), (("kill", 0, 30),)),
    Fault("a Python exception", (("raised", 1),), (0.3, 0.5), (("exception", 1, 30),)),
    Fault("SIGKILL of two of four", (("died", 1),), (0.3, 0.5), (("kill", 1, 30), ("kill", 2, 30)), workers=4),
    Fault(
        "a second SIGKILL during recovery",
        (("died", 1), ("died", 0)),
        (0.3, 1.0),
        (("kill", 1, 30),),
        workers=4,
        outside=kill_one_of_the_next_generation,
    ),
    Fault("SIGSTOP", (("frozen", 1),), (1.0, 0.5), (("stop", 1, 30),)),
    Fault("interpreter held", (("interpreter held", 1),), (1.1, 0.5), (("gil", 1, 30),)),
    Fault("endless loop", (("stalled", 1),), (1.1, 0.5), (("hang", 1, 30),)),
    Fault("a collective skipped", (("out of step", 1),), (1.1, 0.5), (("skip_collective", 1, 30),)),
    Fault("all workers killed", (("died", 0),), (0.3, 10.0), outside=kill_all),
)


def run(fault: Fault | None, run_dir: Path) -> str:
    """Run with this fault, or none. Returns the hash of losses and last weights."""
    inject = (
        ", ".join(f"{{kind: {kind}, rank: {rank}, step: {step}}}" for kind, rank, step in fault.inject) if fault else ""
    )
    words = [*WORDS, f"cluster.workers={fault.workers if fault else 3}", f"fault.inject=[{inject}]"]
    handle = rt.start(small(run_dir, *words, *(fault.words if fault else ())))
    if fault and fault.outside:
        threading.Thread(target=fault.outside, args=(run_dir,), daemon=True).start()
    result = handle.result(timeout=280)
    assert (result.outcome, result.steps) == ("done", STEPS)
    return fingerprint(run_dir)


def fingerprint(run_dir: Path) -> str:
    """Of every step's loss and norm, and of the bytes of the last checkpoint's tensors."""
    import torch

    from raytrain_hpc.checkpoint.manifest import read_manifest
    from raytrain_hpc.checkpoint.shard import read_pieces
    from raytrain_hpc.state.holding import TORCH_DTYPES, Held, Holding, digest
    from raytrain_hpc.state.index import Box

    last = {line["step"]: line for line in lines(run_dir / "metrics.jsonl")}
    assert sorted(last) == list(range(1, STEPS + 1))
    curve = [(last[step]["train/loss"], last[step]["train/grad_norm"]) for step in sorted(last)]
    checkpoint = read_manifest(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    holding = Holding(
        Held(
            one.name, one.shape, one.dtype, Box.whole(one.shape), torch.empty(one.shape, dtype=TORCH_DTYPES[one.dtype])
        )
        for one in checkpoint.index.values()
    )
    read_pieces(checkpoint, holding)
    return hashlib.sha256(repr((curve, digest(holding))).encode()).hexdigest()[:16]


def cost(fault: Fault, run_dir: Path) -> tuple[list[float], list[float], int]:
    """Detection and recovery of each incident, and steps lost, having checked that the right rank is named."""
    incidents = lines(run_dir / "incidents.jsonl")
    named = tuple((one["kind"], one["rank"]) for one in incidents)
    assert named == fault.expected, named
    killed = sorted({rank for kind, rank, _ in fault.inject if kind == "kill"})
    assert not killed or incidents[0]["ranks"] == killed
    struck = [mark.stat().st_mtime for mark in sorted((run_dir / "injected").glob("*"))]
    detected = [max(0.0, incidents[0]["time"] - min(struck))] if struck else []
    after = [
        line["time/unix"] for line in lines(run_dir / "metrics.jsonl") if line["time/unix"] > incidents[-1]["time"]
    ]
    return detected, [min(after) - incidents[-1]["time"]], sum(one["steps_lost"] or 0 for one in incidents)


def measured(fault: Fault, reference: str, directory: Path, rounds: int) -> Cost:
    """A row, run `rounds` times."""
    found = Cost()
    for number in range(rounds):
        run_dir = directory / f"{FAULTS.index(fault)}-{number}"
        same = run(fault, run_dir) == reference
        detected, recovered, lost = cost(fault, run_dir)
        found.detected_s += detected
        found.recovered_s += recovered
        found.steps_lost = max(found.steps_lost, lost)
        found.same &= same
    return found


def workers(run_dir: Path) -> tuple[int, list[int]]:
    """Generation and pids of the ranks now."""
    path = run_dir / "workers.json"
    if not path.exists():
        return 0, []
    content = json.loads(path.read_text())
    return content["generation"], [worker["pid"] for worker in content["workers"]]


def steps_of(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def until(holds: Callable[[], bool], every_s: float, timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(every_s)


def _stamp(run_dir: Path) -> None:
    (run_dir / "injected").mkdir(exist_ok=True)
    (run_dir / "injected" / "outside").touch()


def table(chosen: Sequence[Fault], rounds: int) -> list[str]:
    """The rows, printed as they are made."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    rows = [
        "| fault | named | detected after, s | target | next step after, s | target | steps lost | bits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as directory:
        reference = run(None, Path(directory) / "undisturbed")
        for fault in chosen:
            found = measured(fault, reference, Path(directory), rounds)
            named = ", ".join(f"{kind}: rank {rank}" for kind, rank in fault.expected)
            row = [
                fault.name,
                named,
                f"{median(found.detected_s):.2f}",
                f"{fault.targets[0]:g}",
                f"{median(found.recovered_s):.2f}",
                f"{fault.targets[1]:g}",
                str(found.steps_lost),
                "same" if found.same else "DIFFER",
            ]
            rows.append(f"| {' | '.join(row)} |")
            print(rows[-1], flush=True)
    ray.shutdown()
    return rows


HEAD = f"""# What a fault costs

Written by `python -m tests.driver.faults`: each row {ROUNDS} runs of {STEPS} steps on gloo workers of one thread, in
one Ray on one machine; medians. The model is tiny, so these are the times of finding out, forming groups, and moving
state in memory. *Detected after* counts from the fault, *next step after* from its detection to the next committed
step, on fewer ranks or with a spare. *Bits*: losses and gradient norms of all steps, and the last weights and
moments, against the run without a fault (`train.deterministic=elastic`). Targets are seconds.

"""


if __name__ == "__main__":
    words = sys.argv[1:]
    rows_wanted = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    made = table(rows_wanted, 1 if words else ROUNDS)
    if not words:
        TABLE.write_text(HEAD + "\n".join(made) + "\n")
