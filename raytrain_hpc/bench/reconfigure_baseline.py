"""Peer of `bench recovery`: the PyTorch baseline on a process group that torch reconfigures after a fault.

    python reconfigure_baseline.py JOB.json DIRECTORY launch RANKS
    python reconfigure_baseline.py JOB.json DIRECTORY RANK RANKS PORT

torch has the primitive (`_reconfigure`), but nothing that decides who remains: here, ranks whose collective has failed
meet in a store for one second, and those that have come continue. Model and optimizer stay in memory; the step in
progress is computed again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from raytrain_hpc.bench.restart_baseline import average_over_ranks
from raytrain_hpc.bench.step_report import StepReport
from raytrain_hpc.bench.torch_baseline import BaselineJob, build_model, build_optimizer, train_step
from raytrain_hpc.torch_private_groups import get_reconfigure_handle, has_reconfigure, reconfigure

COLLECTIVE_TIMEOUT = timedelta(seconds=5)  # as torchft's example has it
MEETING_S = 1.0
START_TIMEOUT = timedelta(seconds=60)

if not has_reconfigure():
    raise ImportError(f"torch {torch.__version__} cannot reconfigure process groups, 2.14 can")


def launch(job_file: str, directory: str, num_ranks: int) -> None:
    """Start a store and the ranks, and wait for them."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [job_file, directory]
    processes = [
        subprocess.Popen([sys.executable, __file__, *words, str(rank), str(num_ranks), str(store.port)])
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.wait()


def train(job: BaselineJob, directory: Path, rank: int, num_ranks: int, port: int) -> None:
    """Train as one rank, with all ranks at first, then with those that are left."""
    torch.set_num_threads(job.threads)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=START_TIMEOUT)
    group_store = PrefixStore("group", store)
    dist.init_process_group(
        "gloo", store=group_store, rank=rank, world_size=num_ranks, timeout=COLLECTIVE_TIMEOUT, enable_reconfigure=True
    )  # type: ignore[call-arg, unused-ignore]
    model = build_model(job)
    optimizer, tokens = build_optimizer(model, job), np.load(job.tokens, mmap_mode="r")
    report, step, generation = StepReport(directory, rank, reports=rank == 0), 0, 0
    members = meet(store, generation, rank, list(range(num_ranks)), START_TIMEOUT.total_seconds())
    while step < job.steps:
        try:
            replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
            local_batch, place = job.global_batch_size // len(members), members.index(rank)
            while step < job.steps:
                report.raise_if_injected(step)
                offset = (step * job.global_batch_size) % len(tokens) + place * local_batch
                loss = train_step(replicated, optimizer, np.array(tokens[offset : offset + local_batch]), job)
                step += 1
                report.record(step, average_over_ranks(loss), generation)
        except RuntimeError:  # a collective has failed: some rank is lost
            generation += 1
            members = meet(store, generation, rank, members, MEETING_S)


def meet(store: Store, generation: int, rank: int, expected: list[int], seconds: float) -> list[int]:
    """Wait for the expected ranks for at most `seconds`, form a group of those that came, and return them."""
    keys = {peer: f"{generation}/{peer}" for peer in expected}
    store.set(keys[rank], get_reconfigure_handle())
    deadline = time.monotonic() + seconds
    while not store.check(list(keys.values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    present = [peer for peer, key in keys.items() if store.check([key])]
    members_key = f"{generation}/members"
    if rank == present[0]:
        store.set(members_key, json.dumps(present))
    members: list[int] = json.loads(store.get(members_key))
    handles = [store.get(keys[peer]).decode() for peer in members]
    reconfigure(generation, handles, COLLECTIVE_TIMEOUT)
    return members


if __name__ == "__main__":
    job_path, run_directory, role, num_ranks, *store_port = sys.argv[1:]
    if role == "launch":
        launch(job_path, run_directory, int(num_ranks))
    else:
        job = BaselineJob.from_json(json.loads(Path(job_path).read_text()))
        train(job, Path(run_directory), int(role), int(num_ranks), int(store_port[0]))
