"""Warm-up of the compiler in one process: a rank that was warmed up compiles nothing, and trains with the same bits."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.training.compile_warmup import warm_up_compiler
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

if TYPE_CHECKING:
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

CPU, STEPS = torch.device("cpu"), 2
TWO = "cluster.workers=2"
MIXTURE = [*LLAMA, "model.num_kv_heads=1", "model.num_experts=5", "model.load_balancing=bias"]
SETTINGS = {
    "replicas, dropout": [TWO, *GPT2, "model.tie_embeddings=true", "model.dropout=0.1"],
    "ZeRO-3, bf16, uneven": [TWO, *LLAMA, "parallel.zero=3", "train.dtype=bf16", "train.global_batch_size=9"],
    "tp": [TWO, *LLAMA, "model.num_kv_heads=2", "parallel.tp=2", "parallel.activation_checkpointing=full"],
    "pp, deferred weight gradients, LoRA": [
        *(TWO, *LLAMA, "model.num_layers=4", "parallel.pp=2", "parallel.pp_schedule=zbv", "lora.rank=3")
    ],
    "cp, documents": [TWO, *LLAMA, "parallel.cp=2", "data.packing=documents"],
    "ep": [TWO, *MIXTURE, "parallel.ep=2", "train.global_batch_size=9"],
}
BASE = ["model.vocab_size=65", "model.ffn_size=50", "train.seq_len=15", "train.micro_batch_size=3"]


@dataclass(frozen=True)
class Observation:
    """What a rank observed: losses, and how many graphs were compiled before training and after it."""

    losses: list[float]
    grad_norms: list[float]
    val_loss: float
    num_graphs_before: int
    num_graphs_after: int


def train(rank: int, rendezvous: Rendezvous, spec: WorkerSpec, warm: bool) -> Observation:
    """Train and evaluate with compiled blocks. Graphs are traced, but not translated to C++, which takes a minute."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        if warm:
            generator_state = torch.get_rng_state()
            warm_up_compiler(spec, CPU)
            assert not torch.distributed.is_initialized() and torch.equal(torch.get_rng_state(), generator_state)
            assert not any(isinstance(instance, Decoder) for instance in gc.get_objects())
        before = counters["stats"]["unique_graphs"]
        trainer = build_trainer(spec, rank, CPU, rendezvous, ControlChannel())
        results = [trainer.train_step(step) for step in range(STEPS)]
        evaluator: Any = trainer.completion.evaluator
        val_loss = evaluator.evaluate()["val/loss"]
    after = counters["stats"]["unique_graphs"]
    return Observation([r.loss for r in results], [r.grad_norm for r in results], val_loss, before, after)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_that_was_warmed_up_compiles_nothing(pool: WarmPool, name: str) -> None:
    """Every process is warmed up for every rank, and becomes one of them."""
    config = make_small_config(None, *BASE, *SETTINGS[name], "train.compile=true")
    world_size = int(config.cluster.workers)
    spec = make_worker_spec(config, world_size, steps_to=STEPS)
    cold, warm = (pool.call(train, world_size, spec, is_warm) for is_warm in (False, True))
    for expected, observed in zip(cold, warm, strict=True):
        assert observed.num_graphs_after == observed.num_graphs_before > 0
        assert expected.num_graphs_after > expected.num_graphs_before == 0
        assert (observed.losses, observed.grad_norms) == (expected.losses, expected.grad_norms)
        assert observed.val_loss == expected.val_loss
