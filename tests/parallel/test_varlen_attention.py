"""Variable-length attention: with FlashAttention on a GPU, and with a stand-in for its kernel on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_hpc.parallel import varlen_attention
from raytrain_hpc.parallel.document_attention import DocumentAttention, SegmentFinder
from raytrain_hpc.parallel.segment_attention import (
    Segment,
    SegmentMask,
    attend_segments,
    attend_segments_backward,
)
from raytrain_hpc.parallel.varlen_attention import (
    OffsetFinder,
    attend_varlen,
    attend_varlen_backward,
    compute_offsets,
    has_varlen_kernel,
)

# Starts of the documents of three sequences: some are one position long, one is a whole sequence.
STARTS = [[0, 1, 9, 10, 16], [0, 5], [0]]
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make_documents(length: int, device: str = "cpu") -> Tensor:
    """Return document numbers [3, length], which start anew in each row."""
    documents = torch.zeros(3, length, dtype=torch.int64)
    for row, starts in enumerate(STARTS):
        for start in starts[1:]:
            documents[row, start:] += 1
    return documents.to(device)


def make_inputs(length: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Return q, k, v and the gradient of the output, heads after positions in memory, as the decoder has them."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(3, length, heads, head_dim, generator=generator).to(device, dtype).transpose(1, 2)
        for heads in (4, kv_heads, kv_heads, 4)
    ]


def compute_reference(inputs: list[Tensor], documents: Tensor) -> list[Tensor]:
    """Return output, log-sum-exp and gradients of dense attention in fp64."""
    q, k, v, grad_out = (x.double().requires_grad_() for x in inputs)
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril().unsqueeze(1)
    scores = scores.masked_fill(~visible, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
    return [out, scores.logsumexp(-1), *torch.autograd.grad(out, (q, k, v), grad_out)]


class RowsKernel:
    """The operators of FlashAttention over rows of documents, document by document on a CPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        """Return the output [n, heads, d] and the log-sum-exp [heads, n] of rows [n, heads, d], and three others."""
        assert rest[0] is offsets and rest[1:] == (21, 21, 0.0, True, False)
        out, lse = attend_segments(*map(self._to_batch, (q, k, v)), self._make_mask(offsets))
        return out[0].transpose(0, 1), lse[0], Tensor(), Tensor(), Tensor()

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, offsets: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        """Return the gradients [n, heads, d] of rows."""
        rows = map(self._to_batch, (grad_out, q, k, v, out))
        gradients = attend_segments_backward(*rows, lse.unsqueeze(0), self._make_mask(offsets))
        return tuple(gradient[0].transpose(0, 1) for gradient in gradients)

    def _to_batch(self, rows: Tensor) -> Tensor:
        return rows.transpose(0, 1).unsqueeze(0)

    def _make_mask(self, offsets: Tensor) -> SegmentMask:
        bounds = offsets.tolist()
        parts = [slice(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
        return SegmentMask([Segment(0, part, part) for part in parts], causal=True)


def test_offsets_are_the_starts_of_documents_in_the_flattened_batch() -> None:
    offsets = compute_offsets(make_documents(21))
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [0, 1, 9, 10, 16, 21, 26, 42, 63]


def test_offsets_of_a_batch_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []

    def count(documents: Tensor) -> Tensor:
        calls.append(documents)
        return compute_offsets(documents)

    monkeypatch.setattr(varlen_attention, "compute_offsets", count)
    find, batches = OffsetFinder(), [make_documents(21) for _ in range(3)]
    for documents in (*batches, *reversed(batches)):  # forward and backward passes of a pipeline
        assert find(documents).tolist() == compute_offsets(documents).tolist()
    assert len(calls) == 3


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_rows_of_documents_give_the_values_and_gradients_of_a_dense_mask(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int
) -> None:
    kernel = RowsKernel()
    monkeypatch.setattr(varlen_attention, "flash_attention", kernel.forward)
    monkeypatch.setattr(varlen_attention, "flash_attention_backward", kernel.backward)
    documents = make_documents(21)
    q, k, v, grad_out = inputs = make_inputs(21, kv_heads, 8, torch.float64)
    offsets = compute_offsets(documents)
    out, lse = attend_varlen(q, k, v, offsets)
    gradients = attend_varlen_backward(grad_out, q, k, v, out, lse, offsets)
    for actual, expected in zip((out, lse, *gradients), compute_reference(inputs, documents), strict=True):
        assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-12)


def test_cpus_have_no_such_kernel() -> None:
    assert not has_varlen_kernel(torch.zeros(1, 1, 4, 8, dtype=torch.bfloat16))


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("length", [21, 300])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(4, 64), (2, 128)])
def test_documents_on_a_gpu_give_the_values_and_gradients_of_a_dense_mask(
    compiles: bool, length: int, kv_heads: int, head_dim: int
) -> None:
    import raytrain_hpc.parallel.collective_ops  # noqa: F401  (registers operators)

    documents = make_documents(length, "cuda")
    q, k, v, grad_out = inputs = make_inputs(length, kv_heads, head_dim, torch.bfloat16, "cuda")
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    attention: Any = DocumentAttention(SegmentFinder())
    out = (torch.compile(attention) if compiles else attention)(*leaves, documents)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    expected_out, _, *expected_gradients = compute_reference(inputs, documents)
    for actual, expected in zip((out, *gradients), (expected_out, *expected_gradients), strict=True):
        assert (actual - expected).norm() <= 8e-3 * expected.norm()


@pytest.mark.gpu
@NO_GPU
def test_fp32_on_a_gpu_uses_a_mask() -> None:
    documents = make_documents(32, "cuda")
    q, k, v, _ = inputs = make_inputs(32, 2, 64, torch.float32, "cuda")
    out = DocumentAttention(SegmentFinder())(q, k, v, documents)
    expected = compute_reference(inputs, documents)[0]
    assert (out - expected).norm() <= 1e-5 * expected.norm()
