"""Faults of ranks that share one GPU, on NCCL: `python -m tests.driver.gpu_faults OUT.jsonl`

Each run has one layout and one fault of each kind after the other, each a line of OUT.jsonl with its phases: detection,
recovery, steps lost. Losses and last state are compared with a run without faults. `--device cpu` tries the script on
gloo, without the faults of GPUs. Runs start until `--seconds` have passed.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

import raytrain_hpc as rt
from raytrain_hpc.cli.drill import INCIDENT_KINDS, fingerprint
from raytrain_hpc.config.schema import Config
from tests.json_lines import read_json_lines
from tests.warm_pool import make_small_config

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {  # name -> (ranks, settings)
    "dp 2": (2, ()),
    "ZeRO-3, 2 ranks": (2, ("parallel.zero=3",)),
    "tp 2": (2, ("parallel.tp=2",)),
    "pp 2": (2, ("parallel.pp=2",)),
    "dp 3": (3, ()),
    "ZeRO-3, 4 ranks": (4, ("parallel.zero=3",)),
    "tp 2 x dp 2": (4, ("parallel.tp=2",)),
}
FAULTS = ("kill", "stop", "gil", "hang", "exception", "segfault", "skip_collective", "nan", "bitflip")
GPU_FAULTS = ("oom", "gpu_hang", "gpu_error")
KINDS = INCIDENT_KINDS | {"bitflip": ("corrupt", "replicas differ")}  # two replicas: unknown which is wrong
STEPS_BETWEEN = 10
WORDS = (
    "model.dropout=0.1",
    "train.micro_batch_size=1",
    "train.global_batch_size=12",
    "train.deterministic=elastic",
    "checkpoint.interval=0",
    "data.engine=local",
    "fault.max_failures=5",
    "fault.replica_check_interval=1",
    "fault.keep_verified_state=true",
)


def share_one_gpu() -> None:
    """Let NCCL form groups of ranks that share a GPU: each process claims to be a host of its own.

    Called by Ray at the start of each worker process. See `tests.warm_pool`, which does the same without Ray.
    """
    os.environ |= {"NCCL_HOSTID": f"process-{os.getpid()}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"NCCL_NET": "Socket", "NCCL_MAX_NCHANNELS": "2"}


def make_config(run_dir: Path, device: str, layout: str, faults: Sequence[str], spares: int) -> Config:
    """Return a run with one fault of each kind in rank 1, or without any."""
    ranks, settings = LAYOUTS[layout]
    steps = STEPS_BETWEEN * (len(faults) + 1)
    inject = ", ".join(
        f"{{kind: {kind}, rank: 1, step: {STEPS_BETWEEN * number}}}" for number, kind in enumerate(faults, start=1)
    )
    words = [f"train.steps={steps}", f"fault.inject=[{inject}]", f"cluster.spares={spares}"]
    words += [f"cluster.workers={ranks}", f"cluster.min_workers={ranks}", f"cluster.device={device}"]
    return make_small_config(run_dir, *WORDS, *settings, *words)


def list_kinds(device: str, layout: str) -> list[str]:
    """Return the kinds of faults for a layout. Only replicas can be compared."""
    kinds = FAULTS + (GPU_FAULTS if device == "cuda" else ())
    has_replicas = layout in ("dp 2", "dp 3", "tp 2 x dp 2")
    return [kind for kind in kinds if kind != "bitflip" or has_replicas]


def measure_layout(device: str, layout: str, spares: int, directory: Path) -> Iterator[dict[str, Any]]:
    """Run a layout without and with faults; yield a record per fault, and one of the whole run."""
    faults = list_kinds(device, layout)
    run_dir, reference_dir = directory / "faults", directory / "undisturbed"
    reference = make_config(reference_dir, device, layout, faults, 0)
    reference.fault.inject = []
    rt.train(reference, quiet=True)
    common = {"layout": layout, "spares": spares}
    try:
        result = rt.train(make_config(run_dir, device, layout, faults, spares), quiet=True)
        outcome = result.outcome
    except rt.RaytrainError as error:
        outcome = f"{type(error).__name__}: {error}"
    incidents = read_json_lines(run_dir / "incidents.jsonl")
    for incident in incidents:
        keys = ("kind", "rank", "step", "detected_s", "recovered_s", "steps_lost", "phases", "reason")
        number = (incident["step"] + 1) // STEPS_BETWEEN
        kind = faults[number - 1] if 0 < number <= len(faults) else "?"
        named = incident["kind"] in KINDS.get(kind, ()) and (incident["rank"] == 1 or 1 in incident["ranks"])
        yield {**common, "fault": kind, "named": named, **{key: incident.get(key) for key in keys}}
    is_done = outcome == "done"
    same = fingerprint(run_dir) == fingerprint(reference_dir) if is_done else None
    yield {**common, "faults": len(faults), "incidents": len(incidents), "outcome": outcome, "same_bits": same}


def main() -> None:
    """Run the layouts that the arguments choose, and append their records to the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--spares", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--seconds", type=float, default=500.0)
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    os.environ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"  # all workers see the one GPU
    os.environ.setdefault("RAY_worker_niceness", "0")
    is_gpu = arguments.device == "cuda"
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=5 if is_gpu else 0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": share_one_gpu} if is_gpu else None,
    )
    for spares in arguments.spares:
        for layout in arguments.layouts:
            if time.monotonic() > end:
                break
            with tempfile.TemporaryDirectory() as directory, arguments.out.open("a") as file:
                for record in measure_layout(arguments.device, layout, spares, Path(directory)):
                    print(json.dumps(record), file=file, flush=True)
                    print(json.dumps(record), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
