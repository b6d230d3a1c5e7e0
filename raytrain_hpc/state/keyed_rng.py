"""Random bits as a pure function of (seed, step, sample, position, layer, site, element index).

Keyed bits need no generator state; `derive_seed` instead seeds torch generators. The bits of a key do not depend on
ranks, on the order of calls, or on how a batch is split, and dropout repeats its mask when activations are recomputed.
Keys are int64 tensors of shape [b], one key per sample, or [b, t], one key per position of a sample; a rank with a part
of the sequence takes that part of the keys. They are derived in this order: seed and step, sample, position, layer,
site. A mask is hashed from a key and the index of each element within the key's row.
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
    """Derive a 63-bit seed for a torch generator from all parts, as in `derive_seed(seed, "layers.0.mlp.up.weight")`.

    The number 1 and the text "1" are different parts.
    """
    encoded = (f"{type(part).__name__}:{len(str(part))}:{part};" for part in parts)
    digest = blake2b("".join(encoded).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_sample_keys(seed: int, step: int, samples: Tensor) -> Tensor:
    """Derive keys, int64 [b], for one step from sample numbers of the run (data/loader/sampler.py), int64 [b]."""
    return fold_in(samples, _splitmix64_step(_splitmix64_step(seed) + step))


def fold_in(keys: Tensor, number: int) -> Tensor:
    """Derive one key per key for `number`, such as a layer or a dropout site.

    Like `jax.random.fold_in`. Call it for the layer outside each block, so that one compiled block serves all layers.
    """
    return _splitmix64_finalize(keys + _to_int64(_splitmix64_step(number)))


def derive_position_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """Derive keys, int64 [b, t], for positions, int64 [t], of samples with keys int64 [b]."""
    return _splitmix64_finalize(keys[:, None] + _splitmix64_finalize(positions + _to_int64(_INCREMENT)))


def keyed_dropout(x: Tensor, p: float, keys: Tensor, site: int = 0) -> Tensor:
    """Zero each element of x with probability p and scale the others by 1 / (1 - p).

    Call in training only. 0 <= p < 1. keys: int64, of the shape of x's leading dimensions, [b] or [b, t]. The trailing
    dimensions are the elements of a key; they must be unsharded, because elements are numbered from 0 on each rank.
    `site`: 0 to 7, distinguishes calls that share keys. The mask does not depend on x's dtype.
    """
    if p == 0.0:
        return x
    element_shape = x.shape[keys.dim() :]
    index = torch.arange(element_shape.numel(), dtype=torch.int32, device=x.device).view(element_shape)
    site_keys = _splitmix64_finalize(keys + _SITE_TERMS[site]).view(*keys.shape, *[1] * len(element_shape))
    bits = _hash(index, site_keys.to(torch.int32), (site_keys >> 32).to(torch.int32))
    # The bits are compared as signed numbers, hence the shift by half of the range.
    threshold = min(round(p * 2**32), 2**32 - 1) - 2**31
    return (x * (bits >= threshold)).mul_(1.0 / (1.0 - p))


def _hash(index: Tensor, key_low: Tensor, key_high: Tensor) -> Tensor:
    """Hash int32 indices with the two int32 halves of a key to uniform int32 bits.

    32-bit lanes are four times as fast as splitmix64 on CPU. The high half enters between two rounds: with one half
    alone, one pair of samples in thousands would have the same mask up to swapped elements. The final shift of triple32
    is omitted because it changes the low bits only and the threshold reads the high ones. The rounds work in place
    because fresh buffers for the intermediate values cost more than the arithmetic.
    """
    x = index ^ key_low
    x.bitwise_xor_((x >> 17).bitwise_and_(0x7FFF)).mul_(_HASH_1).add_(key_high)
    x.bitwise_xor_((x >> 11).bitwise_and_(0x1FFFFF)).mul_(_HASH_2)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_HASH_3)


def _splitmix64_finalize(x: Tensor) -> Tensor:
    """Apply the splitmix64 finalizer to int64. Products wrap; the masks make the right shifts logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _to_int64(_MULTIPLY_1)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _to_int64(_MULTIPLY_2)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _splitmix64_step(value: int) -> int:
    """Apply one splitmix64 step (increment, then finalizer) to a Python int; 0 <= result < 2**64."""
    x = (value + _INCREMENT) & _BITS64
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _BITS64
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _BITS64
    return x ^ (x >> 31)


def _to_int64(word: int) -> int:
    """Return the signed 64-bit integer with the same bits."""
    word &= _BITS64
    return word - (1 << 64) if word >> 63 else word


# What `fold_in` adds to the keys for each site. The compiler can take a site for a variable, with which it cannot do
# this arithmetic; an index into a table is a constant again.
_SITE_TERMS = tuple(_to_int64(_splitmix64_step(site)) for site in range(8))
