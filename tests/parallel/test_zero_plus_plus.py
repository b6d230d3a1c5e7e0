"""ZeRO++: weights resharded within a node, and quantized collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.parallel.quantized_collectives import BLOCK_SIZE, dequantize, get_quantized_nbytes, quantize
from tests.parallel.collective_counter import CollectiveCounter
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

FOUR = ["cluster.workers=4", "parallel.zero=3", "train.micro_batch_size=1"]
MICROBATCHES = 3  # per rank, of 12


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("length", "block_size"), [(1, 1), (BLOCK_SIZE, BLOCK_SIZE), (3 * BLOCK_SIZE + 7, 194)])
def test_quantization_error_is_at_most_half_a_step(bits: int, length: int, block_size: int) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn((3, length), generator=generator) * torch.tensor([[1e-6], [1.0], [1e4]])
    x[:, 0] = 0.0
    message = quantize(x, bits)
    assert message.dtype == torch.uint8 and message.shape == (3, get_quantized_nbytes(length, bits))
    error = (dequantize(message, length, bits) - x).abs()
    for start in range(0, length, block_size):
        block = slice(start, start + block_size)
        step = x[:, block].abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert (error[:, block] <= 0.5001 * step).all()
    assert not dequantize(quantize(torch.zeros(1, 5), bits), 5, bits).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_all_codes_are_exact(bits: int) -> None:
    max_code = 2 ** (bits - 1) - 1
    x = torch.arange(-max_code, max_code + 1, dtype=torch.float32).view(1, -1)
    assert torch.equal(dequantize(quantize(x, bits), x.shape[1], bits), x)


def count_step(trainer: Any) -> tuple[float, dict[int, int], dict[int, int], int]:
    """Run one step; return loss, elements gathered and reduced by group size, and quantized bytes."""
    with CollectiveCounter() as collectives:
        loss = trainer.train_step(0).loss
    gathered, reduced = collectives.count_by_size("all_gather"), collectives.count_by_size("reduce_scatter")
    return loss, gathered, reduced, trainer.model_step.model.gradient_sync.quantized_traffic.bytes


def test_backward_gathers_within_the_node(pool: WarmPool) -> None:
    full = pool.inspect_trainers(count_step, make_small_config(None, *FOUR))
    within_node = pool.inspect_trainers(count_step, make_small_config(None, *FOUR, "parallel.reshard_over=2"))
    for (loss, gathered, reduced, _), (node_loss, node_gathered, node_reduced, _) in zip(
        full, within_node, strict=True
    ):
        assert node_loss == loss  # bit for bit
        assert reduced == node_reduced
        forward_elements = gathered[4] // 2  # three quarters of the weights per pass, forward and backward
        assert node_gathered == {4: forward_elements, 2: forward_elements * 2 // 3}


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_every_axis_has_its_own_groups_of_a_node(pool: WarmPool, axis: str) -> None:
    words = ("cluster.workers=8", "parallel.zero=3", "train.micro_batch_size=1", f"parallel.{axis}=2")
    full = pool.inspect_trainers(count_step, make_small_config(None, *words))
    within_node = pool.inspect_trainers(count_step, make_small_config(None, *words, "parallel.reshard_over=2"))
    for (loss, gathered, *_), (node_loss, node_gathered, *_) in zip(full, within_node, strict=True):
        assert node_loss == loss  # bit for bit
        assert node_gathered[4] == gathered[4] // 2  # forward
        assert node_gathered[2] - gathered.get(2, 0) == node_gathered[4] * 2 // 3  # backward


@pytest.mark.parametrize("what", ["weights", "gradients", "both"])
def test_quantized_collectives_send_fewer_bytes(pool: WarmPool, what: str) -> None:
    (_, gathered, reduced, _), *_ = pool.inspect_trainers(count_step, make_small_config(None, *FOUR))
    (_, quantized_gathered, quantized_reduced, sent_bytes), *_ = pool.inspect_trainers(
        count_step, make_small_config(None, *FOUR, f"parallel.quantize={what}")
    )
    # Blocks of weights are rows of 32 or 128, and some elements are in vectors.
    weight_bytes, gradient_bytes = gathered[4] * (1 + 4 / 32), reduced[4] * (0.5 + 4 / BLOCK_SIZE)
    expected = {"weights": weight_bytes, "gradients": gradient_bytes, "both": weight_bytes + gradient_bytes}[what]
    assert sent_bytes == pytest.approx(expected, rel=0.1)  # some blocks are not full
    if what == "weights":
        assert quantized_reduced == reduced
    else:  # reduced by all-to-all instead
        assert not quantized_reduced and (what == "both" or quantized_gathered == gathered)


def train_losses(pool: WarmPool, *words: str) -> list[float]:
    words = ("cluster.workers=2", "parallel.zero=3", "train.steps=6", "lr_scheduler.warmup_steps=1", *words)
    return [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words))[0])]


def test_quantized_training_is_repeatable_and_close_to_exact(pool: WarmPool) -> None:
    exact, quantized, repeated = (
        train_losses(pool),
        train_losses(pool, "parallel.quantize=both"),
        train_losses(pool, "parallel.quantize=both"),
    )
    assert quantized == repeated and quantized != exact
    assert quantized == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parallel.zero=0", "parallel.quantize=both"], "needs parallel.zero=1, 2 or 3"),
        (["parallel.zero=2", "parallel.reshard_over=2"], "needs parallel.zero=3"),
        (["parallel.zero=3", "parallel.reshard_over=3"], "must divide dp_shard=4"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(make_small_config(tmp_path, "cluster.workers=4", *words), None, print)
    assert message in str(refused.value)
