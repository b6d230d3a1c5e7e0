"""Hashes of tensors, against one computed with integers of Python, and what changes them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from raytrain_hpc.state.tensor_hash import compute_hash

BITS64 = (1 << 64) - 1
ROW_WORDS = 32768


def compute_splitmix64(state: int) -> int:
    """Return the output of splitmix64 for a state, as in the reference implementation of S. Vigna."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & BITS64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & BITS64
    return state ^ (state >> 31)


def compute_weight(sequence: int, position: int) -> int:
    key = compute_splitmix64((sequence + 0x9E3779B97F4A7C15) & BITS64)
    return compute_splitmix64((position + key) & BITS64) | 1


def compute_expected_hash(tensor: Tensor) -> int:
    """Sum the mixed words of a tensor, with the weight of the position in a row and that of the row, modulo 2**64."""
    content = tensor.contiguous().numpy().tobytes()
    content += bytes(-len(content) % 8)
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    rows = [words[start : start + ROW_WORDS] for start in range(0, len(words), ROW_WORDS)]
    total = 0
    for number, row in enumerate(rows):
        weight = compute_weight(2, number) if len(row) == ROW_WORDS else 1
        total += weight * sum((word ^ (word >> 29)) * compute_weight(1, i) for i, word in enumerate(row))
    total &= BITS64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 1025, 65536, 70001])
def test_hash_is_the_weighted_sum_of_mixed_words(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randint(0, 255, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    numbers = tensor if dtype != torch.bfloat16 else tensor.view(torch.int16)  # which NumPy has
    assert int(compute_hash(tensor)) == compute_expected_hash(numbers)


def test_hash_is_of_the_content_in_order_wherever_it_is_in_memory() -> None:
    tensor = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    shifted = torch.cat((torch.zeros(1), tensor.flatten()))[1:].view(7, 300)  # not aligned to words of 64 bits
    assert shifted.data_ptr() % 8
    assert compute_hash(shifted) == compute_hash(tensor) == compute_hash(tensor.t().contiguous().t())
    assert compute_hash(tensor.t()) != compute_hash(tensor)


def test_hashing_leaves_the_tensor_unchanged() -> None:
    tensor = torch.randn(3 * 2 * ROW_WORDS + 5, generator=torch.Generator().manual_seed(1))
    copy = tensor.clone()
    compute_hash(tensor)
    assert torch.equal(tensor, copy)


def test_every_flipped_bit_changes_the_hash() -> None:
    tensor = torch.randn(2 * ROW_WORDS + 1500, generator=torch.Generator().manual_seed(2))
    expected, bits = compute_hash(tensor), tensor.view(torch.int32)
    for position in (0, 1, 511, 1024, 2 * ROW_WORDS - 1, 2 * ROW_WORDS, len(tensor) - 1):
        for bit in range(32):
            flip(bits, bit, [position])
            assert compute_hash(tensor) != expected
            flip(bits, bit, [position])
    assert compute_hash(tensor) == expected


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_sign_bits_flipped_together_do_not_cancel(dtype: torch.dtype, num_rows: int) -> None:
    """In pairs, tiles and columns, as a lane of a vector unit or a tile of a matrix product would."""
    width, bit = 2048, dtype.itemsize * 8 - 1
    size = num_rows * ROW_WORDS * 8 // dtype.itemsize
    bits = torch.randint(-100, 100, (size,), generator=torch.Generator().manual_seed(3), dtype=dtype)
    expected = compute_hash(bits)
    corners = [0, 1, 2, 3, 7, 1024, width, width + 1, 2 * width, size // 2, size - width, size - 1]
    groups: list[list[int]] = [list(pair) for pair in itertools.combinations(corners, 2)]
    groups += [[p, p + 1, p + width, p + width + 1] for p in (0, 2, 5)]
    groups += [list(range(lane, size, 512)) for lane in (0, 3)] + [list(range(size))]
    for positions in groups:
        flip(bits, bit, positions)
        assert compute_hash(bits) != expected, positions
        flip(bits, bit, positions)
    assert compute_hash(bits) == expected


@pytest.mark.parametrize("num_elements", [1, 512, 1024, 2048, 2 * ROW_WORDS])
def test_parts_that_change_places_change_the_hash(num_elements: int) -> None:
    tensor = torch.randn(8 * ROW_WORDS, generator=torch.Generator().manual_seed(4))
    parts = tensor.view(-1, num_elements)
    for first, second in ((0, 1), (1, 2), (0, len(parts) - 1)):
        exchanged = parts.clone()
        exchanged[[first, second]] = exchanged[[second, first]]
        assert compute_hash(exchanged) != compute_hash(tensor)


def test_values_that_change_in_opposite_directions_do_not_cancel() -> None:
    """Such as a sum of which one part went to another element, in any two places of a matrix."""
    generator = torch.Generator().manual_seed(5)
    matrix = torch.randint(-1000, 1000, (64, 4096), generator=generator)
    expected = compute_hash(matrix)
    for _ in range(500):
        (row, other_row), (column, other_column) = (torch.randint(0, n, (2,), generator=generator) for n in (64, 4096))
        changed = matrix.clone()
        changed[row, column] += 1
        changed[other_row, other_column] -= 1
        assert torch.equal(changed, matrix) == (compute_hash(changed) == expected)


def flip(bits: Tensor, bit: int, positions: list[int]) -> None:
    """Flip a bit of the integers at some positions."""
    top = bits.dtype.itemsize * 8 - 1
    bits[torch.tensor(positions)] ^= 1 << bit if bit < top else -(1 << bit)
