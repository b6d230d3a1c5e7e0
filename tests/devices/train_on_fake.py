"""Train runs on the CPU and on the fake accelerator; print losses and calls of the device as one line of JSON each.

python -m tests.devices.train_on_fake LIBRARY DIRECTORY NAME...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from raytrain_hpc.api import train
from tests.devices import fake_accelerator
from tests.json_lines import read_json_lines
from tests.warm_pool import make_small_config

RUNS = {
    "plain": ["model.dropout=0.1"],
    "snapshots and checkpoints": ["checkpoint.interval=2", "eval.interval=2"],
    "offload": ["parallel.offload=cpu", "parallel.activation_offload=cpu"],
    "Muon": ["optimizer.name=muon"],
    "elastic, chunks": ["train.deterministic=elastic", "train.loss_chunks=3"],
    "bf16": ["train.dtype=bf16", "train.weight_copies=true"],
    "documents": ["data.packing=documents"],
    "experts": ["model.num_experts=4", "model.activation=swiglu"],
    "moments on disk": ["parallel.offload=disk"],
}


def run(directory: Path, name: str, device: str) -> dict[str, Any]:
    """Train one run and return its losses, memory and device."""
    directory.mkdir()
    words = [f"parallel.offload_dir={directory}"] if "moments on disk" in name else []
    words += ["cluster.workers=0", f"cluster.device={device}", "train.dtype=fp32", "train.compile=false", *RUNS[name]]
    result = train(make_small_config(directory, *words))
    steps = read_json_lines(directory / "metrics.jsonl")
    (path,) = directory.glob("workers*.json")
    return {
        "losses": [step["train/loss"] for step in steps if "train/loss" in step],
        "outcome": str(result),
        "peak_gib": steps[-1]["memory/peak_gib"],
        "device": json.loads(path.read_text()),
    }


def main(library: str, directory: str, *names: str) -> None:
    """Train the named runs on both devices."""
    fake_accelerator.register(Path(library))  # autograd starts a thread per device with the first backward pass
    for name in names:
        expected = run(Path(directory, f"{name}-cpu"), name, "cpu")
        fake_accelerator.CALLS.clear()
        actual = run(Path(directory, f"{name}-fake"), name, "auto")
        print(json.dumps({"name": name, "cpu": expected, "fake": actual, "calls": fake_accelerator.CALLS}))


if __name__ == "__main__":
    main(*sys.argv[1:])
