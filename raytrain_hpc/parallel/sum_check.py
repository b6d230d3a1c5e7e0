"""Check of a rank's own sums of gradients in audited steps.

Two ranks add up what ranks exchange, but only the rank itself adds the gradients of its microbatches before. Each such
addition is therefore made twice, and partial sums are hashed while they are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from raytrain_hpc.state.tensor_hash import compute_hash

_PIECE_ELEMENTS = 1 << 22  # of the second sum in memory at once: 16 MiB in fp32


class SumCheck:
    """Check of the additions of one sum, and of its partial sums in memory. `label`: names what is summed."""

    def __init__(self, label: str):
        self.label = label
        self._expected: dict[Tensor, Tensor] = {}  # by partial sum, its hash
        self._comparisons: list[Tensor] = []  # expected and actual hashes, int64 [2]

    def record(self, value: Tensor) -> None:
        """Hash a value that will be added."""
        self._expected[value] = _hash_value(value)

    def pre_add(self, left: Tensor, right: Tensor) -> None:
        """Verify two partial sums, and hash their sum. Call before `right` is added to `left` in place."""
        self.verify([left, right])
        flat, other = left.view(-1), right.view(-1)
        self._expected[left] = _compute_hash(left.numel(), lambda piece: flat[piece] + other[piece])
        del self._expected[right]

    def verify(self, values: Iterable[Tensor]) -> None:
        """Compare the hashes of partial sums with those that they must have, without waiting for the device."""
        for value in values:
            self._comparisons.append(torch.stack([self._expected[value], _hash_value(value)]))

    def is_wrong(self) -> bool:
        """Return whether a partial sum had another hash. Waits for the device."""
        if not self._comparisons:
            return False
        expected, actual = torch.stack(self._comparisons).unbind(1)
        return not torch.equal(expected, actual)


def _hash_value(value: Tensor) -> Tensor:
    flat = value.view(-1)
    return _compute_hash(flat.numel(), lambda piece: flat[piece])


def _compute_hash(num_elements: int, get_piece: Callable[[slice], Tensor]) -> Tensor:
    """Return the hash of the hashes of all pieces of a tensor."""
    starts = range(0, num_elements, _PIECE_ELEMENTS)
    hashes = [compute_hash(get_piece(slice(start, start + _PIECE_ELEMENTS))) for start in starts]
    return compute_hash(torch.stack(hashes))
