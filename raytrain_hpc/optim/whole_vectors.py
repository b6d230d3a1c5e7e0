"""Fused kernels whose bits do not depend on where a slice of a tensor begins and ends.

A kernel processes the elements of a slice in vectors, and those that do not fill one with other instructions, whose
results can differ in the last bit. Which elements these are depends on the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

_VECTOR_ELEMENTS = 16  # a multiple of the elements per vector register for all types, and of what a thread gets

Kernel = Callable[[Sequence[list[Tensor]]], None]


def run_on_whole_vectors(kernel: Kernel, operands: Sequence[list[Tensor]]) -> None:
    """Call an element-wise kernel such that it processes every element in a whole vector.

    `operands`: lists of equally many tensors, which the kernel changes in place: those at one index have the same
    order of elements in memory, without gaps. The ends of tensors are copied into a tensor of whole vectors, filled up
    with zeros, and back.
    """
    lengths = [tensor.numel() for tensor in operands[0]]
    ends = [index for index, length in enumerate(lengths) if length % _VECTOR_ELEMENTS]
    if not ends:
        kernel(operands)
        return
    flat = [[tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors] for tensors in operands]
    whole = [length - length % _VECTOR_ELEMENTS for length in lengths]
    padded = [_copy_ends([tensors[index][whole[index] :] for index in ends]) for tensors in flat]
    filled = [index for index, length in enumerate(whole) if length]
    kernel([[*(tensors[i][: whole[i]] for i in filled), end] for tensors, end in zip(flat, padded, strict=True)])
    for tensors, end in zip(flat, padded, strict=True):
        for row, index in zip(end, ends, strict=True):
            tensors[index][whole[index] :] = row[: lengths[index] - whole[index]]


def _copy_ends(ends: Sequence[Tensor]) -> Tensor:
    """Return the ends of tensors as rows [n, _VECTOR_ELEMENTS]."""
    padded = ends[0].new_zeros(len(ends), _VECTOR_ELEMENTS)
    for row, end in zip(padded, ends, strict=True):
        row[: len(end)] = end
    return padded
