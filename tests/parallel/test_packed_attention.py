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
from raytrain_hpc.parallel.document_attention import DocumentAttention, SegmentFinder
from raytrain_hpc.parallel.segment_attention import find_segments
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


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "tolerance"),
    [(4, torch.float64, 1e-12), (2, torch.float64, 1e-12), (2, torch.bfloat16, 1e-2)],
)
def test_segments_give_the_values_and_gradients_of_a_dense_mask(
    kv_heads: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    documents = make_packed()[2]
    segments = find_segments(documents, documents)
    parts = [slice(0, 1), slice(1, 9), slice(9, 10)]
    assert segments[:3] == [(0, part, part) for part in parts] and len(segments) == 7
    inputs = [
        torch.randn(2, TOTAL, heads, 8, generator=generator).mul(3).to(dtype).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads)
    ]
    q, k, v = (x.double().requires_grad_() for x in inputs)
    scores = q @ k.repeat_interleave(4 // kv_heads, 1).mT / 8**0.5
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v.repeat_interleave(4 // kv_heads, 1)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    leaves = [x.detach().requires_grad_() for x in inputs]
    attended = DocumentAttention(SegmentFinder())(*leaves, documents)
    actual = torch.autograd.grad((attended * weights).sum(), leaves)
    for result, reference in zip((attended, *actual), (expected, *wanted), strict=True):
        assert result.dtype == dtype and (result - reference).norm() <= tolerance * reference.norm()


def test_compiled_attention_is_one_graph_for_all_documents() -> None:
    import torch._dynamo

    import raytrain_hpc.parallel.collective_ops  # noqa: F401  (registers operators)

    generator = torch.Generator().manual_seed(2)
    attention = DocumentAttention(SegmentFinder())
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for starts in ([1, 9, 10, 16], [5], [20]):
        documents = torch.zeros(2, TOTAL, dtype=torch.int64)
        for start in starts:
            documents[1, start:] += 1
        inputs = [torch.randn(2, 4, TOTAL, 8, generator=generator).requires_grad_() for _ in range(3)]
        outputs = attention(*inputs, documents), compiled(*inputs, documents)
        weights = torch.randn(outputs[0].shape, generator=generator)
        grads = [torch.autograd.grad((output * weights).sum(), inputs) for output in outputs]
        for expected, actual in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]), strict=True):
            assert torch.equal(actual, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_training_on_documents_makes_no_mask(pool: WarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pool.inspect_trainers(list_attention, make_small_config(None, *WORDS, "data.packing=documents"))[0]
    assert trainer == ["DocumentAttention"] * 2


def list_attention(trainer: Any) -> list[str]:
    """Return the classes of the attention of each layer."""
    decoder = trainer.model_step.model.modules[0]
    return [type(block.attention.core_attention).__name__ for block in decoder.blocks().values()]
