"""Euclidean norm over all gradients, independent of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.torch_private import foreach_norm

Region = tuple[slice, ...] | None  # part of a rank's slice; None: all of it


_DIGIT_BITS = 26  # per digit; a square has two digits, and 2**37 digits add up within 64 bits
_CHUNK_ELEMENTS = 1 << 20  # elements squared at a time


class GradientNorm:
    """Norm that counts every global element once, on the first rank that holds it.

    `regions`: the parts of each gradient that this rank counts. `group`: the ranks that together hold one whole state
    (None: this rank alone). Squares are added in fp64 across tensors and ranks, so that the norm depends on the layout
    by rounding only.
    """

    def __init__(self, regions: Mapping[str, Sequence[Region]], group: dist.ProcessGroup | None, device: torch.device):
        self._regions, self._group, self._device = regions, group, device

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm, an fp64 scalar, of gradients by parameter name. Collective if there is a group."""
        regions = self._select_regions(gradients)
        if regions:
            total = torch.stack(foreach_norm(regions)).double().square().sum()
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
    """Norm with the same bits under any layout: squares are added as integers, in which order does not matter.

    Elements are scaled by the power of two above the largest one, squared, and rounded to 52 bits below 1.
    """

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm, an fp64 scalar, of gradients by parameter name; not finite if an element is not."""
        regions = [piece for piece in self._select_regions(gradients) if piece.numel()]
        largest = torch.zeros((), dtype=torch.float64, device=self._device)
        if regions:
            largest = torch.stack([piece.abs().max() for piece in regions]).max().double()
        if self._group is not None:
            largest = largest.nan_to_num(nan=torch.inf)  # a maximum over ranks may lose a NaN
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        if not bool(largest.isfinite()) or not bool(largest):
            return largest
        _, exponent = torch.frexp(largest)
        digits = torch.zeros(2, dtype=torch.int64, device=self._device)
        for piece in (chunk for region in regions for chunk in torch.split(region.reshape(-1), _CHUNK_ELEMENTS)):
            squares = torch.ldexp(piece.double(), -exponent).square_().mul_(2.0**_DIGIT_BITS)
            high = squares.floor()
            digits[0] += high.to(torch.int64).sum()
            digits[1] += squares.sub_(high).mul_(2.0**_DIGIT_BITS).round_().to(torch.int64).sum()
        if self._group is not None:
            dist.all_reduce(digits, group=self._group)
        total = (int(digits[0]) << _DIGIT_BITS) + int(digits[1])
        root = torch.tensor(total * 2.0 ** (-2 * _DIGIT_BITS), dtype=torch.float64, device=self._device).sqrt()
        return torch.ldexp(root, exponent)
