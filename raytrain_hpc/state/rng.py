"""Random bits as a pure function of (seed, step, global sample, layer, site, element index).

No generator state exists, so nothing depends on ranks, on the order of calls or on how a batch is split, and dropout
replays by itself when activations are recomputed. Keys are int64 tensors [b], one a sample, refined from step to layer
by mixing in a number at a time; the masks are hashed from a key and the index of each element within its sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

_BITS64 = (1 << 64) - 1
# The golden-ratio increment and the two multipliers of splitmix64 (Steele, Lea and Flood 2014).
_INCREMENT, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Multipliers of triple32, a low-bias 32-bit permutation (C. Wellons, hash-prospector). Tensor scalars are signed.
_HASH_1, _HASH_2, _HASH_3 = 0xED5AD4BB - (1 << 32), 0xAC4C1B51 - (1 << 32), 0x31848BAB


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed for a named thing: `seed_for(seed, "layers.0.mlp.up.weight")`. Int 1 and text "1" differ."""
    encoded = (f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = blake2b("".join(encoded).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """Keys int64 [b] of the global sample numbers `samples` int64 [b] in one step of the run with this seed."""
    return fold(samples, _mix_int(_mix_int(seed) + step))


def fold(keys: Tensor, number: int) -> Tensor:
    """Keys int64 [b] of a part of what `keys` int64 [b] stand for: a layer of a step, a site of a layer.

    A stack of blocks folds the layer in outside of each block, so that one compiled block serves all layers.
    """
    return _mix(keys + _signed(_mix_int(number)))


def keyed_dropout(x: Tensor, p: float, keys: Tensor, site: int = 0, *, index: Tensor | None = None) -> Tensor:
    """Zero each element of x [b, ...] with probability p and scale the others by 1 / (1 - p).

    keys: int64 [b], one a sample; `site` tells apart the calls that share keys. index: int64, broadcastable to
    x.shape[1:], the index of each element within its whole sample, for a rank that holds a slice of it
    (`slice_index`); by default x holds whole samples. The mask does not depend on x's type.
    """
    if p == 0.0:
        return x
    if index is None:
        index = torch.arange(x.shape[1:].numel(), device=x.device).view(x.shape[1:])
    words = fold(keys, site).view(-1, *[1] * (x.dim() - 1))
    bits = _hash(index.to(torch.int32), words.to(torch.int32), (words >> 32).to(torch.int32))
    # Compared as signed numbers, hence the shift by half of the range.
    dropped_below = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (x * (bits >= dropped_below)).mul_(1.0 / (1.0 - p))


def slice_index(
    size: Sequence[int], start: Sequence[int], length: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Indices int64 [*length], within a whole sample of shape `size`, of the block at `start` of shape `length`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for whole, first, count in zip(size, start, length, strict=True):
        index = index.unsqueeze(-1) * whole + torch.arange(first, first + count, device=device)
    return index


def _hash(index: Tensor, word_1: Tensor, word_2: Tensor) -> Tensor:
    """Uniform int32 bits from int32 indices and two int32 key words.

    32-bit lanes are four times as fast as splitmix64 on CPU. The second word goes in between two rounds: with one word
    the masks of two samples would, for one pair of samples in thousands, be the same one with elements swapped. The
    shift that ends triple32 is left out because it changes the low bits alone, and the threshold reads the high ones.
    The rounds work in place because fresh buffers for the steps in between cost more than the arithmetic.
    """
    x = index ^ word_1
    x.bitwise_xor_((x >> 17).bitwise_and_(0x7FFF)).mul_(_HASH_1).add_(word_2)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF)).mul_(_HASH_2)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_HASH_3)


def _mix(x: Tensor) -> Tensor:
    """Splitmix64's finaliser on int64: products wrap, and the masks make the right shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _signed(_MULTIPLY_1)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _signed(_MULTIPLY_2)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix_int(value: int) -> int:
    """One splitmix64 draw from a Python int: the increment, then the finaliser; 0 <= result < 2**64."""
    x = (value + _INCREMENT) & _BITS64
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _BITS64
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _BITS64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    """The same 64 bits as a number that an int64 tensor takes."""
    word &= _BITS64
    return word - (1 << 64) if word >> 63 else word
