"""Products of groups of rows: the kernel and the loop against dense products in fp64, with gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raytrain_hpc.model.grouped_linear import compute_grouped_weight_grad, grouped_linear

SIZES = [[5, 0, 20, 12], [0, 0, 0, 37], [37, 0, 0, 0], [9, 9, 9, 10], [0, 0, 0, 0]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def compute_dense(rows: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Return the product of each row with the matrix of its group, from a matrix per row."""
    expert_of_row = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return (weight[expert_of_row] @ rows.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("use_kernel", [False, True], ids=["loop", "kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_group_is_multiplied_by_its_matrix(dtype: torch.dtype, sizes: list[int], use_kernel: bool) -> None:
    generator = torch.Generator().manual_seed(sum(sizes[:2]))
    rows = torch.randn(sum(sizes), 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(4, 24, 16, generator=generator).to(dtype).requires_grad_()
    grad_out = torch.randn(sum(sizes), 24, generator=generator).to(dtype)
    exact_rows, exact_weight = (x.detach().double().requires_grad_() for x in (rows, weight))
    expected = compute_dense(exact_rows, exact_weight, sizes)
    expected_grads = torch.autograd.grad(expected, (exact_rows, exact_weight), grad_out.double())

    product = grouped_linear(rows, weight, torch.tensor(sizes), use_kernel)
    grad_rows, grad_weight = torch.autograd.grad(product, (rows, weight), grad_out)
    by_hand = compute_grouped_weight_grad(grad_out, rows.detach(), torch.tensor(sizes), use_kernel)
    pairs = zip((product, grad_rows, grad_weight, by_hand), (expected, *expected_grads, expected_grads[1]), strict=True)
    for actual, exact in pairs:
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), exact, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 10)


def test_the_kernel_computes_in_the_dtype_of_autocast() -> None:
    rows, weight = torch.randn(8, 16), torch.randn(2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_linear(rows, weight, torch.tensor([3, 5]), use_kernel=True).dtype == torch.bfloat16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", SIZES)
def test_the_host_does_not_wait_for_the_kernel(sizes: list[int]) -> None:
    device = torch.device("cuda")
    rows = torch.randn(sum(sizes), 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    counts, factors = torch.tensor(sizes, device=device), torch.randn(sum(sizes), 128, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        product = grouped_linear(rows, weight, counts, use_kernel=True)
        grads = torch.autograd.grad((product * factors).sum(), (rows, weight))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    loop = grouped_linear(rows, weight, counts)
    torch.testing.assert_close(product, loop, rtol=2e-2, atol=2e-2)
    for actual, expected in zip(grads, torch.autograd.grad((loop * factors).sum(), (rows, weight)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-1)
