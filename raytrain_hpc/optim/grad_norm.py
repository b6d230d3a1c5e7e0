"""The Euclidean norm over all gradients, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Region = tuple[slice, ...] | None  # of a rank's slice; None: all of it


_DIGIT_BITS = 26  # of each of two digits of a square; sums of 2**37 of them stay inside 64 bits
_CHUNK_ELEMENTS = 1 << 20  # elements squared at a time


class GradientNorm:
    """Counts every global element once: of what several ranks hold, the first of them counts it.

    `regions` names what this rank counts of each gradient, `group` the ranks that hold one whole state together (None:
    this rank alone). Squares are added in fp64 across tensors and ranks, so that the norm depends on the layout by
    rounding only.
    """

    def __init__(self, regions: Mapping[str, Sequence[Region]], group: dist.ProcessGroup | None, device: torch.device):
        self._regions, self._group, self._device = regions, group, device

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm, an fp64 scalar, of gradients by parameter name."""
        counted = self._select_regions(gradients)
        if counted:
            total = torch.stack(torch._foreach_norm(counted)).double().square().sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total.sqrt()

    def _select_regions(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        return [
            gradient if region is None else gradient[region]
            for name, gradient in gradients.items()
            for region in self._regions.get(name, ())
        ]


class ExactGradientNorm(GradientNorm):
    """The same bits for any layout: squares are added as whole numbers, which no order changes.

    Everything is scaled by the power of two above the largest element, squared, and rounded to 52 bits below 1.
    """

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm, an fp64 scalar, of gradients by parameter name; not finite where one of them is not."""
        counted = [piece for piece in self._select_regions(gradients) if piece.numel()]
        largest = torch.zeros((), dtype=torch.float64, device=self._device)
        if counted:
            largest = torch.stack([piece.abs().max() for piece in counted]).max().double()
        if self._group is not None:
            largest = largest.nan_to_num(nan=torch.inf)  # a maximum over ranks may lose a NaN
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        if not bool(largest.isfinite()) or not bool(largest):
            return largest
        _, exponent = torch.frexp(largest)
        digits = torch.zeros(2, dtype=torch.int64, device=self._device)
        for piece in (chunk for whole in counted for chunk in torch.split(whole.reshape(-1), _CHUNK_ELEMENTS)):
            squares = torch.ldexp(piece.double(), -exponent).square_().mul_(2.0**_DIGIT_BITS)
            high = squares.floor()
            digits[0] += high.to(torch.int64).sum()
            digits[1] += squares.sub_(high).mul_(2.0**_DIGIT_BITS).round_().to(torch.int64).sum()
        if self._group is not None:
            dist.all_reduce(digits, group=self._group)
        whole = (int(digits[0]) << _DIGIT_BITS) + int(digits[1])
        root = torch.tensor(whole * 2.0 ** (-2 * _DIGIT_BITS), dtype=torch.float64, device=self._device).sqrt()
        return torch.ldexp(root, exponent)
