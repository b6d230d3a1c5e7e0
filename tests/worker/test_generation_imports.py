"""A rank of a new process imports nothing inside its first generation: the other ranks would wait for it."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

import pytest

LAYOUTS = {
    "ZeRO-3": ("parallel.zero=3",),
    "replicas, elastic": ("train.deterministic=elastic",),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
    "recompute": ("parallel.activation_checkpointing=full",),
}
UNIMPORTANT = {"torch.profiler._cupti_monitor"}  # a single small module


def train_in_new_process(rank: int, port: int, words: tuple[str, ...], connection: Any) -> None:
    """Start as a worker does, train two steps, and send the modules that were imported after the start."""
    import torch

    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer, configure_torch
    from raytrain_hpc.training.warmup import run_warmup_step
    from tests.warm_pool import make_small_config, make_worker_spec

    spec = make_worker_spec(make_small_config(None, "cluster.workers=2", *words), 2, steps_to=2)
    device = torch.device("cpu")
    configure_torch(spec.config, device)
    run_warmup_step(spec, device)
    before = set(sys.modules)
    trainer = build_trainer(spec, rank, device, Rendezvous("127.0.0.1", port, 1, 60.0), ControlChannel())
    trainer.run(0, 2)
    connection.send(sorted(set(sys.modules) - before))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_generation_imports_nothing(layout: str) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=train_in_new_process, args=(rank, store.port, LAYOUTS[layout], pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        for connection, _ in pipes:
            assert connection.poll(100)
            assert [name for name in connection.recv() if name not in UNIMPORTANT] == []
    finally:
        for process in processes:
            process.kill()
            process.join()
