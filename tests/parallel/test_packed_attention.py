"""Packed documents: on every layout, attention stays within documents, as if each was trained separately."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.param_init import init_weights
from raytrain_hpc.parallel.document_attention import DocumentAttention, find_segments
from tests.parallel.layout_run import LLAMA
from tests.warm_pool import WarmPool, make_small_config

TOTAL = 21
# Starts of the documents of two sequences. Some are one position long, and some span every shard boundary.
STARTS = [[0, 1, 9, 10, 16], [0, 5]]
WORDS = [*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false", "train.dtype=fp64", f"train.seq_len={TOTAL}"]
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "ring-2": ["cluster.workers=2", "parallel.cp=2"],
    "ring-3": ["cluster.workers=3", "parallel.cp=3"],
    "ulysses-2": ["cluster.workers=2", "parallel.cp=2", "parallel.ulysses=2"],
    "ring-2 x ulysses-2": ["cluster.workers=4", "parallel.cp=4", "parallel.ulysses=2"],
    "ring-2, full recompute": ["cluster.workers=2", "parallel.cp=2", "parallel.activation_checkpointing=full"],
}


def make_packed() -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and documents, [2, TOTAL] each."""
    generator = torch.Generator().manual_seed(3)
    tokens, targets = torch.randint(0, 64, (2, 2, TOTAL), generator=generator)
    documents = torch.zeros(2, TOTAL, dtype=torch.int64)
    for row, starts in enumerate(STARTS):
        for start in starts[1:]:
            documents[row, start:] += 1
    return tokens, targets, documents


def compute_loss_and_gradients(trainer: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the packed sequences, summed over ranks."""
    model_step, (tokens, targets, documents) = trainer.model_step, make_packed()
    positions = torch.tensor(model_step.train_module.positions)
    loss = loss_sum(
        model_step.model.modules[0](tokens[:, positions], None, positions, documents=documents), targets[:, positions]
    )
    with model_step.model.gradient_sync.backward_context(0, 0, is_last=True):
        loss.backward()
    model_step.model.finish_grad_sync()
    total = loss.detach().clone()
    if trainer.metrics.context.world_group is not None:
        dist.all_reduce(total)
    return total.item(), {name: parameter.grad.clone() for name, parameter in model_step.model.parameters.items()}


@pytest.fixture(scope="module")
def separate_documents() -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients with each document in a separate pass; rotary embeddings depend on distances only."""
    config = make_small_config(None, *WORDS)
    decoder = Decoder(prepare_run(config, None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    tokens, targets, documents = make_packed()
    total = 0.0
    for row in range(2):
        for document in documents[row].unique():
            in_document = documents[row] == document
            loss = loss_sum(decoder(tokens[row : row + 1, in_document]), targets[row : row + 1, in_document])
            loss.backward()
            total += loss.item()
    return total, {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_stays_within_documents(
    pool: WarmPool, separate_documents: tuple[float, dict[str, Tensor]], layout: str
) -> None:
    expected, gradients = separate_documents
    for loss, result in pool.inspect_trainers(
        compute_loss_and_gradients, make_small_config(None, *WORDS, *LAYOUTS[layout])
    ):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert result.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (result[name] - gradient).norm() <= 1e-11 * gradient.norm(), name


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_segments_give_the_values_and_gradients_of_a_dense_mask(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    documents = make_packed()[2]
    assert find_segments(documents)[:3] == [(0, 0, 1), (0, 1, 9), (0, 9, 10)] and len(find_segments(documents)) == 7
    q, k, v = (
        torch.randn(2, TOTAL, heads, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    scores = q @ k.repeat_interleave(4 // kv_heads, 1).mT / 8**0.5
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.repeat_interleave(4 // kv_heads, 1)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    attended = DocumentAttention()(q, k, v, documents)
    actual = torch.autograd.grad((attended * weights).sum(), (q, k, v))
    torch.testing.assert_close(attended, expected, rtol=1e-12, atol=1e-12)
    for grad, reference in zip(actual, wanted, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-12, atol=1e-12)


def test_training_on_documents_makes_no_mask(pool: WarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pool.inspect_trainers(list_attention, make_small_config(None, *WORDS, "data.packing=documents"))[0]
    assert trainer == ["DocumentAttention"] * 2


def list_attention(trainer: Any) -> list[str]:
    """Return the classes of the attention of each layer."""
    decoder = trainer.model_step.model.modules[0]
    return [type(block.attention.core_attention).__name__ for block in decoder.blocks().values()]
