"""Weights that travel in float8 under ZeRO: fewer bytes, and bit for bit the results of weights that travel in bf16."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel.layout_run import LLAMA
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

# Three ranks pad the rows of weights; 30 channels leave gate, up and down in bf16.
WORDS = [*LLAMA, "model.vocab_size=65", "model.num_kv_heads=2", "model.num_layers=2", "train.dtype=float8"]
WIDE, NARROW = ["model.ffn_size=80"], ["model.ffn_size=30"]
LAYOUTS = {
    "zero3-3": [*WIDE, "cluster.workers=3", "parallel.zero=3"],
    "zero3-2, narrow": [*NARROW, "cluster.workers=2", "parallel.zero=3", "train.float8_head=true"],
    "zero2-2 x tp-2": [*WIDE, "cluster.workers=4", "parallel.zero=2", "parallel.tp=2"],
    "zero3-4, reshard over 2": [*WIDE, "cluster.workers=4", "parallel.zero=3", "parallel.reshard_over=2"],
}


def train(rank: int, rendezvous: Any, spec: Any, is_plain: bool) -> tuple[list[tuple[float, float]], int]:
    """Return loss and gradient norm of each step, and the bytes sent in float8 all-gathers."""
    from raytrain_hpc.parallel import fsdp
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    with mock.patch.object(fsdp, "apply_float8_all_gather", lambda *_: None) if is_plain else nullcontext():
        trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
    results = [trainer.train_step(step) for step in range(spec.end_step)]
    sent = trainer.model_step.model.gradient_sync.quantized_traffic.bytes
    return [(result.loss, result.grad_norm) for result in results], sent


@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_are_those_of_weights_that_travel_in_bf16(pool: WarmPool, layout: str) -> None:
    config = make_small_config(None, *WORDS, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    spec = make_worker_spec(config, world_size, steps_to=2)
    plain, narrow = (pool.call(train, world_size, spec, is_plain) for is_plain in (True, False))
    assert [results for results, _ in narrow] == [results for results, _ in plain]
    assert all(sent == 0 for _, sent in plain) and all(sent > 0 for _, sent in narrow)


def count_bytes(trainer: Any) -> tuple[int, int]:
    """Gather the weights of the first block; return the bytes sent for that, and those of its weights in bf16."""
    model = trainer.model_step.model
    block = model.modules[0].layers["0"]
    before = model.gradient_sync.quantized_traffic.bytes
    full = {name: parameter.full_tensor().bfloat16() for name, parameter in block.named_parameters()}
    block.unshard()
    for name, parameter in block.named_parameters():
        gathered, expected = parameter.detach(), full[name]
        if expected.dim() == 2:  # as they are rounded in one piece
            scale = 2.0 ** torch.floor(torch.log2(448 / expected.abs().max()))
            expected = ((expected * scale).to(torch.float8_e4m3fn).double() / scale.double()).bfloat16()
        assert torch.equal(gathered, expected), name
    return model.gradient_sync.quantized_traffic.bytes - before, sum(2 * tensor.numel() for tensor in full.values())


def test_weights_are_rounded_as_a_whole_and_take_half_the_bytes(pool: WarmPool) -> None:
    config = make_small_config(None, *WORDS, *WIDE, "cluster.workers=2", "parallel.zero=3")
    for sent, bf16_bytes in pool.inspect_trainers(count_bytes, config):
        norms = 2 * 2 * 32
        assert sent == pytest.approx(((bf16_bytes - norms) / 2 + norms) / 2, abs=16), "half of it is the rank's own"
