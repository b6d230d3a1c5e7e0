"""Train compiled on every rank, and count what was compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

from raytrain_hpc.config.schema import Config
from tests.warm_pool import WarmPool, make_worker_spec

if TYPE_CHECKING:
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.worker_spec import WorkerSpec


@contextmanager
def trace_only() -> Iterator[None]:
    """Trace what is compiled, with its backward passes, and do not translate it to C++, which would take a minute."""
    import torch

    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


@dataclass(frozen=True)
class CompiledRun:
    """What a rank observed.

    `num_graphs`: compiled by the end of each step. `split_reasons`: why the compiler split blocks into several graphs.
    """

    losses: list[float]
    grad_norms: list[float]
    num_graphs: list[int]
    split_reasons: list[str]


def run_compiled(
    pool: WarmPool, config: Config, *, steps: int, custom: Any = None, forget: bool = True
) -> list[CompiledRun]:
    """Train `config` with train.compile on cluster.workers ranks; see `trace_only`.

    `forget`: forget what was compiled before, and count from zero.
    """
    world_size = int(config.cluster.workers)
    spec = make_worker_spec(config, world_size, steps_to=steps, custom=custom)
    return pool.call(_train, world_size, spec, steps, forget)


def _train(rank: int, rendezvous: Rendezvous, spec: WorkerSpec, steps: int, forget: bool) -> CompiledRun:
    import torch
    import torch._dynamo
    from torch._dynamo.utils import counters

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    if forget:
        torch._dynamo.reset()
        counters.clear()
    losses, grad_norms, num_graphs = [], [], []
    with trace_only():
        trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
        for step in range(steps):
            result = trainer.train_step(step)
            losses.append(result.loss)
            grad_norms.append(result.grad_norm)
            num_graphs.append(counters["stats"]["unique_graphs"])
    return CompiledRun(losses, grad_norms, num_graphs, sorted(counters["graph_break"]))
