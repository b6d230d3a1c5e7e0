"""Hash of the bits of a tensor, by which audits compare what two ranks have computed."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from raytrain_hpc.state.keyed_rng import fold_in
from raytrain_hpc.torch_device import is_on_accelerator

_WORD_BYTES = 8
_ROW_WORDS = 32768
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES  # 256 KiB: intermediate values stay in the cache of a CPU core
_ROWS_AT_ONCE_ON_DEVICE = 256  # 64 MiB: few kernels, and little memory for intermediate values
_SHIFT = 29  # not a multiple of 16, or sign bits of two elements of a word could cancel
_LOW_BITS = (1 << (64 - _SHIFT)) - 1
_WORD_WEIGHTS, _ROW_WEIGHTS = 1, 2  # numbers that tell the two sequences of weights apart


@torch.no_grad()
def compute_hash(tensor: Tensor) -> Tensor:
    """Return a hash of the bits of a tensor in order, an int64 scalar on its device.

    Each word of 64 bits is mixed (x ^ x >> 29), multiplied by a pseudorandom odd weight of its position in a row and by
    that of its row, and summed modulo 2**64; the last, incomplete row has the weight 1. One changed word is always
    detected. Several are missed if their weighted changes cancel: the chance is below 2**-28 unless all changes are
    confined to the highest bits of mixed words (multilinear hashing; Carter and Wegman 1979, Dietzfelbinger 1996). The
    hash is the same on all devices.
    """
    content = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if not content.numel():
        return torch.zeros((), dtype=torch.int64, device=content.device)
    if content.data_ptr() % _WORD_BYTES or content.storage_offset() % _WORD_BYTES:
        content = content.clone()
    num_rows = content.numel() // _ROW_BYTES
    weights = _get_weights(_WORD_WEIGHTS, _ROW_WORDS, content.device)
    rest = _pad_to_words(content[num_rows * _ROW_BYTES :])
    total = _mix(rest).mul_(weights[: len(rest)]).sum()
    if num_rows:
        rows = content[: num_rows * _ROW_BYTES].view(torch.int64).view(num_rows, _ROW_WORDS)
        total += (_sum_rows(rows, weights) * _get_row_weights(num_rows, content.device)[:num_rows]).sum()
    return total


def _pad_to_words(content: Tensor) -> Tensor:
    """Return bytes as words, int64 [n], of which the last one is padded with zeros."""
    padding = -len(content) % _WORD_BYTES
    return (torch.cat((content, content.new_zeros(padding))) if padding else content).view(torch.int64)


def _mix(words: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x ^ x >> 29, a bijection after which a change of the highest bits is one of lower bits too.

    The highest bit of a product modulo 2**64 is flipped by any odd weight: two such changes would cancel in the sum.
    """
    return torch.bitwise_right_shift(words, _SHIFT, out=out).bitwise_and_(_LOW_BITS).bitwise_xor_(words)


def _sum_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the mixed words of each row of int64 [r, n], int64 [r]."""
    num_rows = len(rows)
    step = min(num_rows, _ROWS_AT_ONCE_ON_DEVICE if is_on_accelerator(rows) else 1)
    sums, buffer = rows.new_empty(num_rows), torch.empty_like(rows[:step])
    for start in range(0, num_rows, step):
        block = rows[start : start + step]
        torch.sum(_mix(block, buffer[: len(block)]).mul_(weights), dim=1, out=sums[start : start + step])
    return sums


def _get_row_weights(count: int, device: torch.device) -> Tensor:
    """Return the weights of at least `count` rows."""
    return _get_weights(_ROW_WEIGHTS, 1 << max(10, (count - 1).bit_length()), device)


@cache
def _get_weights(sequence: int, count: int, device: torch.device) -> Tensor:
    """Return pseudorandom odd numbers, int64 [count]; a longer sequence begins with the same ones."""
    return fold_in(torch.arange(count, dtype=torch.int64, device=device), sequence).bitwise_or_(1)
