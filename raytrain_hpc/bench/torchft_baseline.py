"""Peer of `bench recovery`: the PyTorch baseline under torchft, one replica group per process.

    python torchft_baseline.py JOB.json DIRECTORY launch REPLICAS [late]
    torchrun --nproc-per-node=1 --max-restarts=3 ... torchft_baseline.py JOB.json DIRECTORY REPLICA REPLICAS

The settings are those of torchft's own example: a quorum of at least one replica, a lighthouse with its default
heartbeat timeout (5 s), and 5 s for a collective. Replicas continue with a smaller batch when one is lost; a process
that has died is restarted by its torchrun, and gets the state from another replica. Gradients are reduced by
`Manager.allreduce`: torchft 0.2.0's DistributedDataParallel ends the survivors with an AssertionError in its hook when
a collective fails and the model has more than one bucket, and all state is lost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from raytrain_hpc.bench.step_report import GROW_FILE, StepReport
from raytrain_hpc.bench.torch_baseline import BaselineJob, build_model, build_optimizer, compute_loss

COLLECTIVE_TIMEOUT = timedelta(seconds=5)
QUORUM_TICK_MS, JOIN_TIMEOUT_MS = 100, 10_000


def launch(job_file: str, directory: str, num_replicas: int, *, is_last_late: bool) -> None:
    """Start a lighthouse and one torchrun per replica, and wait for them.

    `is_last_late`: start the last replica when a file "grow" appears in the directory.
    """
    lighthouse = LighthouseServer(
        bind="[::]:0", min_replicas=1, quorum_tick_ms=QUORUM_TICK_MS, join_timeout_ms=JOIN_TIMEOUT_MS
    )
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address(), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=3", "--nproc-per-node=1"]
    processes = []
    for replica in range(num_replicas):
        while is_last_late and replica == num_replicas - 1 and not Path(directory, GROW_FILE).exists():
            time.sleep(0.01)
        words = [__file__, job_file, directory, str(replica), str(num_replicas), *(["late"] if is_last_late else [])]
        processes.append(subprocess.Popen([sys.executable, *launcher, *words], env=environment))
    for process in processes:
        process.wait()
    lighthouse.shutdown()


def train(job: BaselineJob, directory: Path, replica: int, num_replicas: int, *, is_last_late: bool) -> None:
    """Train as one replica. Its rows of a step are the same, however many replicas take part."""
    torch.set_num_threads(job.threads)
    model = build_model(job)
    optimizer = build_optimizer(model, job)

    def get_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def set_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE_TIMEOUT),
        load_state_dict=set_state,
        state_dict=get_state,
        min_replica_size=1,
        timeout=timedelta(seconds=30),
        replica_id=f"replica-{replica}",
    )
    managed = Optimizer(manager, optimizer)
    tokens, local_batch = np.load(job.tokens, mmap_mode="r"), job.global_batch_size // num_replicas
    report, generation, participants = StepReport(directory, replica, reports=replica == 0), 0, num_replicas
    num_expected = num_replicas - is_last_late
    while len(list(directory.glob("[0-9].pid"))) < num_expected:  # else the first one trains alone for a while
        time.sleep(0.01)
    while (step := manager.current_step()) < job.steps:
        report.raise_if_injected(step)
        offset = (step * job.global_batch_size) % len(tokens) + replica * local_batch
        loss = train_step(model, managed, manager, np.array(tokens[offset : offset + local_batch]), job)
        if manager.num_participants() != participants:
            generation, participants = generation + 1, manager.num_participants()
        if manager.current_step() > step:  # otherwise the step was discarded
            report.record(manager.current_step(), loss, generation, participants)
    manager.shutdown()


def train_step(
    model: nn.Module, optimizer: Optimizer, manager: Manager, windows: npt.NDArray[np.int64], job: BaselineJob
) -> float:
    """Run one step on this replica's windows, of which nothing is applied if a collective fails. Return their loss."""
    optimizer.zero_grad()
    loss = compute_loss(model, torch.from_numpy(windows))
    loss.backward()  # type: ignore[no-untyped-call]
    for work in [manager.allreduce(p.grad) for p in model.parameters()]:
        work.wait()
    torch.nn.utils.clip_grad_norm_(model.parameters(), job.grad_clip)
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    job_path, run_directory, role, replicas, *late = sys.argv[1:]
    if role == "launch":
        launch(job_path, run_directory, int(replicas), is_last_late=bool(late))
    else:
        job = BaselineJob.from_json(json.loads(Path(job_path).read_text()))
        train(job, Path(run_directory), int(role), int(replicas), is_last_late=bool(late))
