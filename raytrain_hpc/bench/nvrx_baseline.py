"""Peer of `bench recovery`: the restart baseline under NVIDIA's resiliency extension, restarted within its processes.

    python nvrx_baseline.py JOB.json DIRECTORY launch RANKS SPARES
    python nvrx_baseline.py JOB.json DIRECTORY rank RANKS         (with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)

The settings are the defaults of `inprocess.Wrapper`; 10 s for a collective, as in its example for CPUs. torchrun cannot
start the ranks, since it ends all of them with the first one that dies.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.rank_assignment import MaxActiveWorldSize, ShiftRanks
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raytrain_hpc.bench.restart_baseline import train_loop
from raytrain_hpc.bench.torch_baseline import BaselineJob

COLLECTIVE_TIMEOUT = timedelta(seconds=10)
_PORTS = 3  # of rank 0: unused, store of the process groups, store of the wrapper


def launch(job_file: str, directory: str, ranks: int, spares: int) -> None:
    """Start the ranks and spares, and wait for them."""
    world_size, port = ranks + spares, _find_free_ports()
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, job_file, directory, "rank", str(ranks)]
    processes = [
        subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]
    for process in processes:
        process.wait()


def run_rank(job: BaselineJob, directory: Path, ranks: int) -> None:
    """Train as one rank, or wait as a spare, until the end."""
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        port + 1,
        int(os.environ["WORLD_SIZE"]),
        is_master=os.environ["RANK"] == "0",
        multi_tenant=True,
    )
    assignment = inprocess.Compose(MaxActiveWorldSize(ranks), ShiftRanks())

    def train(call_wrapper: Any = None) -> None:
        generation = call_wrapper.iteration
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(generation), store),
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
        train_loop(job, directory, rank, world_size, generation=generation)

    train.__annotations__["call_wrapper"] = inprocess.CallWrapper  # read by the wrapper, which evaluates no strings
    inprocess.Wrapper(store_kwargs={"port": port + 2}, rank_assignment=assignment)(train)()


def _find_free_ports() -> int:
    """Return the first of several consecutive ports that are free now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        try:
            for number in range(_PORTS):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + number))
        except OSError:
            continue
        return port


if __name__ == "__main__":
    job_path, run_directory, role, num_ranks, *num_spares = sys.argv[1:]
    if role == "launch":
        launch(job_path, run_directory, int(num_ranks), int(num_spares[0]))
    else:
        run_rank(BaselineJob.from_json(json.loads(Path(job_path).read_text())), Path(run_directory), int(num_ranks))
