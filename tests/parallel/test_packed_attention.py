"""Packed documents: attention stays inside them on every layout of a sequence, as if each came alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.param_init import init_weights
from tests.parallel.layout_run import LLAMA
from tests.warm_pool import WarmPool, make_small_config

TOTAL = 21
# Where documents of the two sequences begin; some are one position long, and some lie across every cut.
STARTS = [[0, 1, 9, 10, 16], [0, 5]]
WORDS = [*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false", "train.dtype=fp64", f"train.seq_len={TOTAL}"]
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "ring-2": ["cluster.workers=2", "parallel.cp=2"],
    "ring-3": ["cluster.workers=3", "parallel.cp=3"],
    "ulysses-2": ["cluster.workers=2", "parallel.cp=2", "parallel.ulysses=2"],
    "ring-2 x ulysses-2": ["cluster.workers=4", "parallel.cp=4", "parallel.ulysses=2"],
    "ring-2, full recompute": ["cluster.workers=2", "parallel.cp=2", "parallel.recompute=full"],
}


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and documents [2, TOTAL]."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, 64, (2, 2, TOTAL), generator=generator)
    documents = torch.zeros(2, TOTAL, dtype=torch.int64)
    for row, starts in enumerate(STARTS):
        for start in starts[1:]:
            documents[row, start:] += 1
    return tokens, targets, documents


def loss_and_gradients(trainer: Any) -> tuple[float, dict[str, Tensor]]:
    """Of the packed sequences, on this rank's positions, summed over ranks."""
    passes, (tokens, targets, documents) = trainer.model_step, packed()
    mine = torch.tensor(passes.train_module.positions)
    loss = loss_sum(passes.model.modules[0](tokens[:, mine], None, mine, documents=documents), targets[:, mine])
    with passes.model.gradient_sync.backward_context(0, 0, is_last=True):
        loss.backward()
    passes.model.finish_grad_sync()
    total = loss.detach().clone()
    if trainer.evaluator.context.world_group is not None:
        dist.all_reduce(total)
    return total.item(), {name: p.grad.clone() for name, p in passes.model.parameters.items()}


@pytest.fixture(scope="module")
def apart() -> tuple[float, dict[str, Tensor]]:
    """The same of every document in a pass of its own: rotary positions only know distances."""
    config = make_small_config(None, *WORDS)
    decoder = Decoder(prepare_run(config, None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    tokens, targets, documents = packed()
    total = 0.0
    for row in range(2):
        for document in documents[row].unique():
            here = documents[row] == document
            loss = loss_sum(decoder(tokens[row : row + 1, here]), targets[row : row + 1, here])
            loss.backward()
            total += loss.item()
    return total, {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_do_not_see_each_other(pool: WarmPool, apart: tuple[float, dict[str, Tensor]], layout: str) -> None:
    expected, gradients = apart
    for loss, mine in pool.inspect_trainers(loss_and_gradients, make_small_config(None, *WORDS, *LAYOUTS[layout])):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert mine.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (mine[name] - gradient).norm() <= 1e-11 * gradient.norm(), name
