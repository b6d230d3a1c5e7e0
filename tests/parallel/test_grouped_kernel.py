"""Training with the kernel for groups of rows, on layouts that compute its gradients in different ways."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.expert_parallel import _Exchange
from tests.parallel.compiled_run import trace_only
from tests.parallel.layout_run import LLAMA
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

BASE = [
    *LLAMA,
    "model.num_experts=5",
    "model.shared_expert_size=23",
    "model.ffn_size=48",
    "train.micro_batch_size=3",
    "optimizer.lr=3e-3",
]
TWO = "cluster.workers=2"
LAYOUTS = {
    "one rank": [],
    "compiled, bf16": ["train.compile=true", "train.dtype=bf16"],  # torch traces the kernel in bf16 only
    "recomputed": ["parallel.activation_checkpointing=selective"],
    "tp": ["parallel.tp=2", TWO],
    "ep": ["parallel.ep=2", TWO],
    "ep, compiled": ["parallel.ep=2", TWO, "train.compile=true"],
    "ep, sharded": ["parallel.ep=2", "parallel.zero=3", "cluster.workers=4"],
    "deferred weight gradients": ["parallel.pp=2", "parallel.pp_schedule=zbv", "model.num_layers=4", TWO],
}


class CountKernels(TorchDispatchMode):
    """Counts the calls of the kernel."""

    calls = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code be compiled under this mode. By default, torch would compile no block in this process any more."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def train(rank: int, rendezvous: Any, spec: Any, use_kernel: bool) -> tuple[list[float], int]:
    """Train two steps; return losses and gradient norms, and how often the kernel was called."""
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    def apply(decoder: torch.nn.Module, *_: Any) -> None:
        for experts in decoder.modules():
            if isinstance(experts, Experts):
                experts.use_kernel = use_kernel

    with (
        mock.patch("raytrain_hpc.parallel.parallelize.apply_grouped_kernel", apply),
        trace_only(),
    ):
        trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
        with CountKernels() as kernels:
            results = [trainer.train_step(step) for step in range(2)]
    return [value for result in results for value in (result.loss, result.grad_norm)], kernels.calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_changes_no_loss(pool: WarmPool, layout: str) -> None:
    config = make_small_config(None, *BASE, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    spec = make_worker_spec(config, world_size, steps_to=2)
    loop, kernel = (pool.call(train, world_size, spec, use_kernel) for use_kernel in (False, True))
    for (expected, loop_calls), (actual, kernel_calls) in zip(loop, kernel, strict=True):
        assert loop_calls == 0 < kernel_calls
        assert actual == pytest.approx(expected, rel=2e-3 if "bf16" in layout else 1e-6)


def record_order(trainer: Any) -> list[str]:
    """Train one microbatch; return in which order exchanges and the shared expert of the only layer ran."""
    (module,) = trainer.model_step.model.modules.values()
    shared = module.layers["0"].mlp.shared
    order: list[str] = []
    shared.register_forward_pre_hook(lambda *_: order.append("shared"))
    shared.register_full_backward_pre_hook(lambda *_: order.append("shared, backward"))

    def record(name: str) -> Any:
        real = getattr(_Exchange, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return real(*args, **kwargs)

        return mock.patch.object(_Exchange, name, call)

    with record("start"), record("finish"):
        trainer.train_step(0)
    return order


def test_the_shared_expert_runs_while_rows_travel(pool: WarmPool) -> None:
    words = ["parallel.ep=2", TWO, "model.num_layers=1", "train.micro_batch_size=6", "train.global_batch_size=12"]
    forward = ["start", "shared", "finish", "start", "finish"]
    backward = ["start", "finish", "start", "shared, backward", "finish"]
    for order in pool.inspect_trainers(record_order, make_small_config(None, *BASE, *words)):
        assert order == forward + backward
