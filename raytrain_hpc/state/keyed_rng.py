"""Random bits as a pure function of (seed, step, global sample, layer, site, element index).

No generator state exists, so nothing depends on ranks, on the order of calls or on how a batch is split, and dropout
replays by itself when activations are recomputed. Keys are int64 tensors [b], one a sample, refined from step to layer
by mixing in a number at a time, or [b, t], one a position of a sample, so that a rank with a part of the sequence
takes its part of them. The masks are hashed from a key and the index of each element within what the key stands for.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_BITS64 = (1 << 64) - 1
# The golden-ratio increment and the two multipliers of splitmix64 (Steele, Lea and Flood 2014).
_INCREMENT, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Multipliers of triple32, a low-bias 32-bit permutation (C. Wellons, hash-prospector). Tensor scalars are signed.
_HASH_1, _HASH_2, _HASH_3 = 0xED5AD4BB - (1 << 32), 0xAC4C1B51 - (1 << 32), 0x31848BAB


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed for a named thing: `seed_for(seed, "layers.0.mlp.up.weight")`. Int 1 and text "1" differ."""
    encoded = (f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = blake2b("".join(encoded).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """Keys int64 [b] of the global sample numbers `samples` int64 [b] in one step of the run with this seed."""
    return fold_in(samples, _mix_int(_mix_int(seed) + step))


def fold_in(keys: Tensor, number: int) -> Tensor:
    """Keys of a part of what `keys` stand for, int64 of the same shape: a layer of a step, a site of a layer.

    A stack of blocks folds the layer in outside of each block, so that one compiled block serves all layers.
    """
    return _mix(keys + _to_int64(_mix_int(number)))


def derive_position_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys int64 [b, t] of the positions int64 [t] of samples with keys int64 [b]."""
    return _mix(keys[:, None] + _mix(positions + _to_int64(_INCREMENT)))


def keyed_dropout(x: Tensor, p: float, keys: Tensor, site: int = 0) -> Tensor:
    """Zero each element of x with probability p and scale the others by 1 / (1 - p).

    keys: int64 of the shape of x's first dimensions, [b] or [b, t]; a key's elements are the rest of the dimensions.
    `site` tells apart the calls that share keys. The mask does not depend on x's type.
    """
    if p == 0.0:
        return x
    rest = x.shape[keys.dim() :]
    index = torch.arange(rest.numel(), dtype=torch.int32, device=x.device).view(rest)
    words = fold_in(keys, site).view(*keys.shape, *[1] * len(rest))
    bits = _hash(index, words.to(torch.int32), (words >> 32).to(torch.int32))
    # Compared as signed numbers, hence the shift by half of the range.
    dropped_below = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (x * (bits >= dropped_below)).mul_(1.0 / (1.0 - p))


def _hash(index: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """Uniform int32 bits from int32 indices and two int32 key words.

    32-bit lanes are four times as fast as splitmix64 on CPU. The second word goes in between two rounds: with one word
    the masks of two samples would, for one pair of samples in thousands, be the same one with elements swapped. The
    shift that ends triple32 is left out because it changes the low bits alone, and the threshold reads the high ones.
    The rounds work in place because fresh buffers for the steps in between cost more than the arithmetic.
    """
    x = index ^ key_low
    x.bitwise_xor_((x >> 17).bitwise_and_(0x7FFF)).mul_(_HASH_1).add_(key_high)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF)).mul_(_HASH_2)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_HASH_3)


def _mix(x: Tensor) -> Tensor:
    """Splitmix64's finaliser on int64: products wrap, and the masks make the right shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _to_int64(_MULTIPLY_1)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _to_int64(_MULTIPLY_2)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _mix_int(value: int) -> int:
    """One splitmix64 draw from a Python int: the increment, then the finaliser; 0 <= result < 2**64."""
    x = (value + _INCREMENT) & _BITS64
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _BITS64
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _BITS64
    return x ^ (x >> 31)


def _to_int64(word: int) -> int:
    """The same 64 bits as a number that an int64 tensor takes."""
    word &= _BITS64
    return word - (1 << 64) if word >> 63 else word
