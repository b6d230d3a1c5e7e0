"""One product for gate and up projection: the values and gradients of two, on every layout."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from raytrain_hpc.model.decoder import SwiGLU
from tests.parallel.compiled_run import run_compiled
from tests.parallel.layout_run import MODELS
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

BASE = ["train.micro_batch_size=3", "optimizer.lr=3e-3"]
TWO = "cluster.workers=2"
LAYOUTS = {
    "one rank": [],
    "replicas": [TWO],
    "zero3": [TWO, "parallel.zero=3"],
    "tp": [TWO, "parallel.tp=2"],
    "pp": [TWO, "parallel.pp=2"],
    "cp": [TWO, "parallel.cp=2"],
    "recomputed": ["parallel.activation_checkpointing=selective"],
}


def train(rank: int, rendezvous: Any, spec: Any) -> tuple[list[float], int]:
    """Train three steps with fused projections; return losses and gradient norms, and the number of products."""
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    with mock.patch("raytrain_hpc.parallel.parallelize.should_fuse_gate_up", lambda *_: True):
        trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
    results = [trainer.train_step(step) for step in range(3)]
    networks = [
        module
        for stage in trainer.model_step.model.modules.values()
        for module in stage.modules()
        if isinstance(module, SwiGLU)
    ]
    num_fused = sum("project" in vars(network) for network in networks)
    return [value for result in results for value in (result.loss, result.grad_norm)], num_fused


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "moe"])
def test_one_product_gives_the_losses_and_gradients_of_two(pool: WarmPool, model: str, layout: str) -> None:
    words = [*MODELS[model], *BASE, "train.dtype=fp64"]
    steps = get_step_metrics(pool.train(make_small_config(None, *words), steps_to=3)[0])
    expected = [step[name] for step in steps for name in ("train/loss", "train/grad_norm")]
    config = make_small_config(None, *words, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    for actual, num_fused in pool.call(train, world_size, make_worker_spec(config, world_size, steps_to=3)):
        assert num_fused == 2 // config.parallel.pp
        assert actual == pytest.approx(expected, rel=1e-11)


def test_compiled_bf16_fuses_and_stays_close(pool: WarmPool) -> None:
    words = [*MODELS["llama"], *BASE, "train.dtype=bf16"]
    (run,) = run_compiled(pool, make_small_config(None, *words, "train.compile=true"), steps=3)
    expected = get_step_metrics(pool.train(make_small_config(None, *words), steps_to=3)[0])
    assert run.losses == pytest.approx([step["train/loss"] for step in expected], rel=2e-3)
    assert run.split_reasons == []


@pytest.mark.parametrize("words", [["lora.rank=2"], ["train.deterministic=elastic", "train.compile=true"], []])
def test_other_projections_stay_two_products(pool: WarmPool, words: list[str]) -> None:
    (num_fused,) = pool.inspect_trainers(count_fused, make_small_config(None, *MODELS["llama"], *BASE, *words))
    assert num_fused == 0


def count_fused(trainer: Any) -> int:
    (module,) = trainer.model_step.model.modules.values()
    return sum("project" in vars(submodule) for submodule in module.modules())
