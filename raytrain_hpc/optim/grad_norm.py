"""Euclidean norm over all gradients, independent of the layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.torch_device import is_accelerator
from raytrain_hpc.torch_private import foreach_norm

Region = tuple[slice, ...] | None  # part of a rank's slice; None: all of it


_SQUARE_BITS = 52  # of a square, as a fraction of the power of two above the largest
_DIGIT_BITS = 26  # a sum of squares is kept in two digits: 2**37 squares add up within 64 bits
_ROW_ELEMENTS = 2048  # squares that add up within 64 bits
_CACHED_ELEMENTS = 1 << 18  # elements squared at a time on a CPU: within a cache
_KERNEL_ELEMENTS = 1 << 25  # on an accelerator: in few kernels


class GradientNorm:
    """Norm that counts every global element once, on the first rank that holds it.

    `regions`: the parts of each gradient that this rank counts. `group`: the ranks that together hold one whole state
    (None: this rank alone). Squares are added in fp64 across tensors and ranks, so that the norm depends on the layout
    by rounding only.
    """

    def __init__(self, regions: Mapping[str, Sequence[Region]], group: dist.ProcessGroup | None, device: torch.device):
        self.regions, self._group, self._device = regions, group, device

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
        return _select(gradients, self.regions)


class ExactGradientNorm(GradientNorm):
    """Norm with the same bits under any layout: squares are added as integers, in which order does not matter.

    Squares are rounded to 52 bits below the square of the power of two above the largest element. Adding one to that
    power does it: the bits of the sum, as an integer, are those of the power plus the rounded square.

    `limit`, `contribution`: of the last norm, the largest element on all ranks, and what `measure` returns for the
    gradients and regions of this rank.
    """

    limit = 0.0
    contribution: Tensor
    _total: tuple[Tensor, Tensor]  # over all ranks: the largest element, and the digits of the sum of squares

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm, an fp64 scalar, of gradients by parameter name; not finite if an element is not."""
        chunks = self._split(self._select_regions(gradients))
        own_largest = largest = find_largest(chunks, self._device)
        if self._group is not None:
            largest = largest.nan_to_num(nan=torch.inf)  # a maximum over ranks may lose a NaN
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        self.limit = largest.item()
        digits = sum_squares(chunks, self.limit, self._device)
        self.contribution = torch.cat([own_largest.view(1).view(torch.int64), digits])
        is_measured = math.isfinite(self.limit) and self.limit
        if self._group is not None and is_measured:
            dist.all_reduce(digits, group=self._group)
        self._total = largest, digits
        if not is_measured:
            return largest
        high, low = digits.tolist()
        root = math.sqrt(((high << _DIGIT_BITS) + low) * 2.0**-_SQUARE_BITS)
        return torch.tensor(math.ldexp(root, _get_exponent(self.limit)), dtype=torch.float64, device=self._device)

    def measure(self, gradients: Mapping[str, Tensor], regions: Mapping[str, Sequence[Region]]) -> Tensor:
        """Return what a rank with these gradients and regions adds to the norm that was computed last, int64 [3].

        These are the bits of its largest element, and its sum of squares. For audits; no communication.
        """
        chunks = self._split(_select(gradients, regions))
        largest = find_largest(chunks, self._device).view(1).view(torch.int64)
        return torch.cat([largest, sum_squares(chunks, self.limit, self._device)])

    def is_total_right(self) -> bool:
        """Return whether the last norm is of what all ranks have contributed, which they exchange.

        For audits. Collective if there is a group.
        """
        if self._group is None:
            return True
        contributions = [torch.empty_like(self.contribution) for _ in range(self._group.size())]
        dist.all_gather(contributions, self.contribution, group=self._group)
        gathered = torch.stack(contributions)
        largest, digits = self._total
        is_right = gathered[:, 0].view(torch.float64).nan_to_num(nan=torch.inf).max() == largest
        return bool(is_right & (join_digits(gathered[:, 1:].sum(0)) == join_digits(digits)))

    def _split(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        max_elements = _KERNEL_ELEMENTS if is_accelerator(self._device) else _CACHED_ELEMENTS
        return list(_split_into_chunks(pieces, max_elements))


def find_largest(chunks: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest absolute value in all chunks, an fp64 scalar; NaN if there is one, 0 without elements."""
    if not chunks:
        return torch.zeros((), dtype=torch.float64, device=device)
    bounds = [torch.aminmax(chunk) for chunk in chunks]
    return torch.stack([bound.abs() for pair in bounds for bound in pair]).max().double()


def sum_squares(chunks: Sequence[Tensor], limit: float, device: torch.device) -> Tensor:
    """Return the sum of squares of all chunks as two digits, int64 [2]. `limit`: of absolute values; 0 if it is none.

    The unit depends on the limit.
    """
    digits = torch.zeros(2, dtype=torch.int64, device=device)
    if math.isfinite(limit) and limit:
        buffer = torch.empty(max(map(len, chunks), default=0), dtype=torch.float64, device=device)
        for chunk in chunks:
            digits += _sum_squares(chunk, _get_exponent(limit), buffer[: len(chunk)])
    return digits


def join_digits(digits: Tensor) -> Tensor:
    """Return a sum of squares as one integer modulo 2**64. Equal sums can have different digits."""
    return (digits[0] << _DIGIT_BITS) + digits[1]


def _get_exponent(limit: float) -> int:
    """Return the exponent of a power of two above a limit."""
    return max(math.frexp(limit)[1], -1000)


def _select(gradients: Mapping[str, Tensor], regions: Mapping[str, Sequence[Region]]) -> list[Tensor]:
    return [
        gradient if region is None else gradient[region]
        for name, gradient in gradients.items()
        for region in regions.get(name, ())
    ]


def _split_into_chunks(pieces: Sequence[Tensor], limit: int) -> Iterator[Tensor]:
    """Yield the elements of all pieces as flat tensors of at most `limit` elements, small pieces joined."""
    small: list[Tensor] = []
    num_small = 0  # elements of all of them
    for piece in pieces:
        flat = piece.reshape(-1)
        if len(flat) > limit:
            yield from torch.split(flat, limit)
            continue
        if small and (small[0].dtype != flat.dtype or num_small + len(flat) > limit):
            yield torch.cat(small)
            small, num_small = [], 0
        if len(flat):
            small.append(flat)
            num_small += len(flat)
    if small:
        yield torch.cat(small)


def _sum_squares(chunk: Tensor, exponent: int, buffer: Tensor) -> Tensor:
    """Return the sum of the squares of a flat tensor as two digits, int64 [2], in units of 2**(2 * exponent - 52).

    `buffer`: fp64, as long as the chunk, overwritten.
    """
    power, squares = 2.0 ** (2 * exponent), buffer.copy_(chunk)
    if chunk.dtype == torch.float64:  # squares could be too small or too large; those of fp32 are exact in fp64
        power, squares = 1.0, squares.mul_(2.0**-exponent)
    integers = squares.mul_(squares).add_(power).view(torch.int64)
    integers -= torch.tensor(power, dtype=torch.float64).view(torch.int64).item()
    num_whole = len(integers) // _ROW_ELEMENTS * _ROW_ELEMENTS
    sums = torch.cat([integers[:num_whole].view(-1, _ROW_ELEMENTS).sum(1), integers[num_whole:].sum().view(1)])
    return torch.stack([(sums >> _DIGIT_BITS).sum(), (sums & ((1 << _DIGIT_BITS) - 1)).sum()])
