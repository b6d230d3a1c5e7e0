"""What ZeRO++ adds to ZeRO: weights kept sharded inside a node, and collectives of few bits."""

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

FOUR = ["cluster.workers=4", "parallel.zero=3", "train.micro_batch=1"]
MICROBATCHES = 3  # a rank, of 12


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("length", [1, BLOCK_SIZE, 3 * BLOCK_SIZE + 7])
def test_a_value_is_off_by_half_a_step_at_most(bits: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn((3, length), generator=generator) * torch.tensor([[1e-6], [1.0], [1e4]])
    x[:, 0] = 0.0
    message = quantize(x, bits)
    assert message.dtype == torch.uint8 and message.shape == (3, get_quantized_nbytes(length, bits))
    error = (dequantize(message, length, bits) - x).abs()
    for start in range(0, length, BLOCK_SIZE):
        block = slice(start, start + BLOCK_SIZE)
        step = x[:, block].abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        assert (error[:, block] <= 0.5001 * step).all()
    assert not dequantize(quantize(torch.zeros(1, 5), bits), 5, bits).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_every_code_survives(bits: int) -> None:
    most = 2 ** (bits - 1) - 1
    x = torch.arange(-most, most + 1, dtype=torch.float32).view(1, -1)
    assert torch.equal(dequantize(quantize(x, bits), x.shape[1], bits), x)


def counted(trainer: Any) -> tuple[float, dict[int, int], dict[int, int], int]:
    """Loss of a step; elements gathered and reduced, by ranks of the group; bytes in quantised collectives."""
    with CollectiveCounter() as collectives:
        loss = trainer.train_step(0).loss
    gathered, reduced = collectives.count_by_size("all_gather"), collectives.count_by_size("reduce_scatter")
    return loss, gathered, reduced, trainer.model_step.model.gradient_sync.quantized_traffic.bytes


def test_backward_gathers_from_the_node(pool: WarmPool) -> None:
    whole = pool.inspect_trainers(counted, make_small_config(None, *FOUR))
    inside = pool.inspect_trainers(counted, make_small_config(None, *FOUR, "parallel.reshard_over=2"))
    for (loss, gathered, reduced, _), (same, by_node, also, _) in zip(whole, inside, strict=True):
        assert same == loss  # bit for bit
        assert reduced == also
        forward = gathered[4] // 2  # three quarters of the weights a pass, forward and backward
        assert by_node == {4: forward, 2: forward * 2 // 3}


@pytest.mark.parametrize("what", ["weights", "gradients", "both"])
def test_few_bits_are_sent_and_the_curve_stays_near(pool: WarmPool, what: str) -> None:
    (_, gathered, reduced, _), *_ = pool.inspect_trainers(counted, make_small_config(None, *FOUR))
    (_, still_gathered, still_reduced, sent), *_ = pool.inspect_trainers(
        counted, make_small_config(None, *FOUR, f"parallel.quantize={what}")
    )
    of_weights, of_gradients = gathered[4] * (1 + 4 / BLOCK_SIZE), reduced[4] * (0.5 + 4 / BLOCK_SIZE)
    expected = {"weights": of_weights, "gradients": of_gradients, "both": of_weights + of_gradients}[what]
    assert sent == pytest.approx(expected, rel=0.1)  # blocks that are not full
    if what == "weights":
        assert still_reduced == reduced
    else:  # reduced by an exchange instead
        assert not still_reduced and (what == "both" or still_gathered == gathered)


def curve(pool: WarmPool, *words: str) -> list[float]:
    words = ("cluster.workers=2", "parallel.zero=3", "train.steps=6", "train.warmup=1", *words)
    return [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words))[0])]


def test_quantised_training_is_repeatable_and_near(pool: WarmPool) -> None:
    exact, rounded, again = curve(pool), curve(pool, "parallel.quantize=both"), curve(pool, "parallel.quantize=both")
    assert rounded == again and rounded != exact
    assert rounded == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.zero=0", "parallel.quantize=both"], "needs parallel.zero=1, 2 or 3"),
        (["parallel.zero=2", "parallel.reshard_over=2"], "needs parallel.zero=3"),
        (["parallel.zero=3", "parallel.reshard_over=3"], "must divide dp_shard=4"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(make_small_config(tmp_path, "cluster.workers=4", *words), None, print)
    assert said in str(refused.value)
