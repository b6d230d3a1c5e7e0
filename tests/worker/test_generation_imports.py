"""A rank of a new process imports nothing inside its first generation: the other ranks would wait for it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import psutil
import pytest

LAYOUTS = {
    "ZeRO-3, recompute": ("parallel.zero=3", "parallel.activation_checkpointing=full"),
    "replicas, elastic": ("train.deterministic=elastic",),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
}
UNIMPORTANT = {"torch.profiler._cupti_monitor"}  # a single small module


def train_in_new_process(port: int, words: tuple[str, ...], pipes: list[Any]) -> None:
    """Start as two workers do, train two steps, and send the modules that were imported after the start.

    The second rank is forked when the modules of the start are imported, and nothing has run yet.
    """
    import torch

    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer, configure_torch
    from raytrain_hpc.training.warmup import run_warmup_step
    from tests.warm_pool import make_small_config, make_worker_spec

    rank = 1 if os.fork() == 0 else 0
    spec = make_worker_spec(make_small_config(None, "cluster.workers=2", *words), 2, steps_to=2)
    device = torch.device("cpu")
    configure_torch(spec.config, device)
    run_warmup_step(spec, device)
    before = set(sys.modules)
    trainer = build_trainer(spec, rank, device, Rendezvous("127.0.0.1", port, 1, 60.0), ControlChannel())
    trainer.run(0, 2)
    pipes[rank].send(sorted(set(sys.modules) - before))
    if rank == 1:
        os._exit(0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_generation_imports_nothing(layout: str) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    senders = [sender for _, sender in pipes]
    process = context.Process(target=train_in_new_process, args=(store.port, LAYOUTS[layout], senders), daemon=True)
    process.start()
    try:
        for connection, _ in pipes:
            assert connection.poll(100)
            assert [name for name in connection.recv() if name not in UNIMPORTANT] == []
    finally:
        started = psutil.Process(process.pid)
        for each in (*started.children(), started):
            each.kill()
        process.join()
