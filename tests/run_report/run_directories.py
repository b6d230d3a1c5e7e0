"""Run directories with the files that a run writes, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_hpc.config.loader import config_to_yaml, load_config

STEP_PHASES = {"data": 0.01, "forward": 0.2, "backward": 0.5, "communication": 0.1, "optimizer": 0.05}


def make_metrics(step: int, **more: Any) -> dict[str, Any]:
    """Return metrics of a step with loss 8 / step and a duration of 1 s, of which no phase accounts for 0.14 s."""
    return {
        "step": step,
        "train/loss": 8.0 / step,
        "train/lr": 1e-3,
        "train/grad_norm": 1.0,
        "train/tokens": 1000 * step,
        "throughput/tokens_per_sec": 1000.0,
        "throughput/tokens_per_sec_per_device": 500.0,
        "throughput/mfu": None,
        "time/unix": 1.7e9 + step,
        "time/step_s": 1.0,
        "time/checkpoint_s": 0.0,
        "memory/peak_gib": 0.75,
        "memory/weights_gib": 0.1,
        "memory/gradients_gib": 0.1,
        "memory/moments_gib": 0.2,
        "elastic/world_size": 2,
        "elastic/generation": 1,
        **{f"time/{part}_s": seconds for part, seconds in STEP_PHASES.items()},
        **more,
    }


VERSIONS = {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0"}

INCIDENT = {
    "kind": "died",
    "rank": 1,
    "node": "host1",
    "node_id": "n1",
    "world": 2,
    "world_after": 1,
    "pid": 42,
    "operation": "ALLREDUCE <3>",
    "reason": "killed by signal 9",
    "step": 3,
    "time": 1.7e9 + 3,
    "detected_s": 0.03,
    "recovered_s": 0.21,
    "phases": {"detect": None, "abort": 0.125, "fence": 0.085},
    "steps_lost": 0,
    "stacks": {"0": "in train_step & co"},
}


def write_run_directory(directory: Path, *, steps: int = 6, name: str = "one", done: bool = True) -> Path:
    """Write a run of `steps` steps with step 3 repeated, a validation loss, rank statistics and an incident."""
    directory.mkdir()
    config = load_config(None, ["train.dtype=fp32", f"run.name={name}", f"run.dir={directory}", "train.steps=6"])
    (directory / "config.yaml").write_text(config_to_yaml(config))
    memory = dict.fromkeys(("weights", "gradients", "moments", "copies", "activations", "working"), 2**27)
    plan = {"layout": {"dp_replicate": 2, "tp": 1, "pp": 1, "zero": 0}, "workers": 2, "memory": memory}
    plan |= {"started": 1.7e9 - 30, "parameters": 886_000, "flops_per_token": 5.7e6}
    plan |= {"microbatches": {"count": 4, "size": 8}}
    (directory / "plan.json").write_text(json.dumps(plan))
    workers = [
        {
            "rank": rank,
            "pid": 40 + rank,
            "node": f"host{rank}",
            "node_id": f"n{rank}",
            "host": f"host{rank}",
            "cpu": "Z80",
            "device": "cpu",
            "memory_gib": None,
            "coordinates": coordinates,
        }
        for rank, coordinates in enumerate(({"pp": 0, "dp_replicate": 0}, {"pp": 1, "dp_replicate": 1}))
    ]
    (directory / "workers.json").write_text(json.dumps({"generation": 1, "versions": VERSIONS, "workers": workers}))
    sample = json.dumps({"step": 6, "prompt": "", "answer": "def <f>(x):"})
    (directory / "samples.jsonl").write_text(f"{sample}\n" + '{"step": 7, "pro')
    statistics = {
        f"ranks/time/step_s/{kind}": value for kind, value in {"mean": 1, "min": 0.9, "max": 1.1, "std": 0.1}.items()
    }
    records = [make_metrics(step) for step in range(1, steps + 1)]
    records[2] |= statistics
    records.insert(2, make_metrics(3, **{"train/loss": 99.0}))
    records[-1]["val/loss"] = 2.5
    text = "".join(json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text(text + '{"step": 7, "train/lo')  # truncated by a kill
    (directory / "incidents.jsonl").write_text(json.dumps(INCIDENT) + "\n")
    if done:
        (directory / "result.json").write_text(
            json.dumps({"outcome": "done", "goodput": 0.93, "val/loss": 2.5, "wall_s": 95.0})
        )
    return directory
