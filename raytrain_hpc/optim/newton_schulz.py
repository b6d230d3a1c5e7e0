"""Orthogonalization of matrices by Newton-Schulz iterations, for Muon (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Chosen by Jordan et al. for the largest slope at zero: singular values end between 0.7 and 1.2, not at 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_STEPS = 5
_EPS = 1e-7  # of the norm, for a matrix of zeros


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return U V^T, nearly, of each matrix U S V^T of a batch [n, rows, columns], in the dtype given."""
    a, b, c = _COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices  # the products are of the size of the shorter side
    wide = x if x.dtype == torch.float64 else x.float()
    x = (wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=_EPS)).to(x.dtype)
    for _ in range(_NUM_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


@torch.no_grad()
def orthogonalize_each(matrices: Sequence[Tensor], *, batched: bool) -> None:
    """Orthogonalize matrices [rows, columns] in place.

    `batched`: those of equal shape in one call, which is faster on accelerators, but not on CPUs. The bits of a matrix
    then depend on the number of others.
    """
    batches: dict[tuple[int, ...], list[Tensor]] = {}
    for number, matrix in enumerate(matrices):
        batches.setdefault((*matrix.shape, 0 if batched else number), []).append(matrix)
    for batch in batches.values():
        for matrix, result in zip(batch, orthogonalize(torch.stack(batch)), strict=True):
            matrix.copy_(result)


def estimate_cost(rows: int, columns: int) -> int:
    """Return the multiplications of one matrix."""
    short, long = min(rows, columns), max(rows, columns)
    return _NUM_STEPS * short * short * (2 * long + short)
