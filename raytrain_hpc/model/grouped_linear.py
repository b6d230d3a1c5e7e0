"""Products of groups of rows with one matrix each, as the experts of a mixture need them.

Either one product after another, for which the host reads how many rows each group has, or all of them in one kernel
of the device, which reads the sizes itself: then the host never waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_hpc.model.autocast import cast_for_autocast
from raytrain_hpc.torch_private import grouped_mm

ALIGNMENT_BYTES = 16  # of the rows of operands of the kernel


def grouped_linear(rows: Tensor, weight: Tensor, sizes: Tensor, use_kernel: bool = False) -> Tensor:
    """Multiply groups of rows [n, i] by one matrix each of weight [num_matrices, o, i]: [n, o].

    `sizes`: int64, rows per group; may be 0. With more groups than matrices, start again at the first matrix after the
    last, which the kernel cannot. `use_kernel`: in one kernel; i and o times the size of an element must be multiples
    of 16 bytes, in fp32, bf16 or fp16.
    """
    if use_kernel:
        return grouped_mm(cast_for_autocast(rows), cast_for_autocast(weight).mT, offs=_get_ends(sizes))
    if torch.compiler.is_compiling():
        product: Tensor = _TracedGroupedLinear.apply(cast_for_autocast(rows), cast_for_autocast(weight), sizes)  # type: ignore[no-untyped-call]
        return product
    num_rows = sizes.tolist()
    matrices = weight.unbind() * (len(num_rows) // len(weight))
    groups = zip(torch.split(rows, num_rows), matrices, strict=True)
    return torch.cat([F.linear(_align(group), _align(matrix)) for group, matrix in groups])


def compute_grouped_weight_grad(grad_out: Tensor, rows: Tensor, sizes: Tensor, use_kernel: bool = False) -> Tensor:
    """Return the gradient [num_groups, o, i] of the weight of `grouped_linear`, zero for groups without rows."""
    if use_kernel:
        return grouped_mm(grad_out.t(), rows, offs=_get_ends(sizes))
    num_rows = sizes.tolist()
    groups = zip(torch.split(grad_out, num_rows), torch.split(rows, num_rows), strict=True)
    return torch.stack([group_grad.t() @ group_rows for group_grad, group_rows in groups])


def _get_ends(sizes: Tensor) -> Tensor:
    return sizes.cumsum(0, dtype=torch.int32)


def _align(x: Tensor) -> Tensor:
    """Return x in memory that starts at a multiple of 16 bytes.

    Elsewhere, products of up to three rows get other bits (MKL), which then depend on the sizes of other groups.
    """
    return x if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone()


class _TracedGroupedLinear(torch.autograd.Function):
    """One product after another for torch.compile, whose graph does not depend on the sizes of the groups."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, sizes)
        return torch.ops.raytrain_hpc.grouped_linear(rows, weight, sizes)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, sizes = ctx.saved_tensors
        grad_rows, grad_weight = torch.ops.raytrain_hpc.grouped_linear_backward(gradients[0], rows, weight, sizes)
        return grad_rows, grad_weight, None
