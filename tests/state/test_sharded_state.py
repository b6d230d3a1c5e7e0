"""Digests, reshards and slices against whole tensors and against an implementation in Python integers."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import (
    ShardedState,
    StateShard,
    compute_digest,
    compute_fingerprint,
    copy_overlap,
    get_local_slice,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def held(name, whole, box):
    shape = tuple(whole.shape)
    local = whole[box.slices_in(Box.from_shape(shape))].clone()
    return StateShard(name, shape, str(whole.dtype).removeprefix("torch."), box, local)


def random_tensor(rng, shape, dtype):
    torch.manual_seed(rng.randrange(2**31))
    return (torch.randn(shape, dtype=torch.float64) * 1000).to(dtype)


def tiling(rng, box, depth):
    """Cut a box at random places, in random dimensions; empty parts happen."""
    if depth == 0 or not box.sizes:
        return [box]
    dim = rng.randrange(len(box.sizes))
    cut = rng.randint(0, box.sizes[dim])
    first, second = list(box.sizes), list(box.sizes)
    first[dim], second[dim] = cut, box.sizes[dim] - cut
    start = list(box.offsets)
    start[dim] += cut
    return tiling(rng, Box(box.offsets, tuple(first)), depth - 1) + tiling(
        rng, Box(tuple(start), tuple(second)), depth - 1
    )


def reference_digest(name, whole):
    """The definition, one element at a time in Python integers."""
    mask = 2**64 - 1
    dtype = str(whole.dtype).removeprefix("torch.")
    identity = f"{name} {dtype} {list(whole.shape)}".encode()
    seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16}[whole.element_size()]
    total = 0
    for position, bits in enumerate(whole.reshape(-1).view(ints).tolist()):
        x = (position * 0x9E3779B97F4A7C15 + seed + bits * 0xD1B54A32D192ED03) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        total += x ^ (x >> 31)
    return total & mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_is_its_definition(dtype):
    whole = random_tensor(random.Random(1), (5, 3, 4), dtype)
    before = whole.clone()
    assert compute_digest(ShardedState([StateShard.from_tensor("a.b", whole)])) == reference_digest("a.b", before)
    assert torch.equal(whole, before), "hashing must not touch the state"


@pytest.mark.parametrize("seed", range(25))
def test_digests_of_any_sharding_add_up_to_that_of_the_whole(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(seed % 5))
    whole = random_tensor(rng, shape, DTYPES[seed % 4])
    parts = tiling(rng, Box.from_shape(shape), 4)
    total = sum(compute_digest(ShardedState([held("w", whole, box)])) for box in parts)
    assert total % 2**64 == compute_digest(ShardedState([StateShard.from_tensor("w", whole)]))


def test_digest_does_not_depend_on_chunks_or_memory_order():
    whole = torch.randn(300, 700)
    expected = compute_digest(ShardedState([StateShard.from_tensor("w", whole)]))
    columns = [held("w", whole, Box((0, a), (300, b - a))) for a, b in [(0, 1), (1, 333), (333, 700)]]
    assert sum(compute_digest(ShardedState([one])) for one in columns) % 2**64 == expected
    assert compute_digest(ShardedState([StateShard.from_tensor("w", whole.t().contiguous().t())])) == expected


def test_digest_sees_a_bit_a_swap_a_name_and_a_sign():
    whole = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    pair = [StateShard.from_tensor("a", whole), StateShard.from_tensor("b", whole + 1)]
    seen = {compute_digest(ShardedState(pair))}
    flipped = whole.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    swapped = whole.clone()
    swapped[0, 0], swapped[2, 3] = whole[2, 3].clone(), whole[0, 0].clone()
    negative_zero = whole.clone()
    negative_zero[0, 0] = -0.0
    for other in (flipped, swapped, negative_zero, whole.t().contiguous(), whole.reshape(4, 3)):
        seen.add(compute_digest(ShardedState([StateShard.from_tensor("a", other), pair[1]])))
    seen.add(compute_digest(ShardedState([StateShard.from_tensor("b", whole), StateShard.from_tensor("a", whole + 1)])))
    assert len(seen) == 7


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_a_fingerprint_sees_every_bit(length: int, dtype: torch.dtype) -> None:
    """Also of a slice that begins where no word of 64 bits does."""
    storage = torch.arange(length + 1).to(dtype)
    part = storage[1:]
    held = ShardedState([StateShard.from_tensor("a", part), StateShard.from_tensor("b", torch.ones(3))])
    before = compute_fingerprint(held)
    flat = part.view(torch.uint8)
    for byte in range(0, len(flat), max(1, len(flat) // 40)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert compute_fingerprint(held) != before
            flat[byte] ^= 1 << bit
    assert compute_fingerprint(held) == before
    assert compute_fingerprint(ShardedState(list(held)[::-1])) != before


@pytest.mark.parametrize("seed", range(15))
def test_reshard_in_memory_is_bit_identical(seed):
    rng = random.Random(100 + seed)
    shape = tuple(rng.randint(1, 9) for _ in range(seed % 4))
    whole = random_tensor(rng, shape, DTYPES[seed % 4])
    source = ShardedState(held("w", whole, box) for box in tiling(rng, Box.from_shape(shape), 3))
    for box in tiling(rng, Box.from_shape(shape), 2):
        target = held("w", torch.zeros_like(whole), box)
        assert copy_overlap(source, ShardedState([target])) == box.numel
        assert torch.equal(target.tensor, whole[box.to_slices(Box.from_shape(shape))])


def test_copy_refuses_another_shape():
    with pytest.raises(ValueError, match="w is float32"):
        copy_overlap(
            ShardedState([StateShard.from_tensor("w", torch.zeros(4))]),
            ShardedState([StateShard.from_tensor("w", torch.zeros(5))]),
        )


def test_a_plain_tensor_is_held_whole_and_shares_memory():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    shape, box, local = get_local_slice(weight)
    assert (shape, box) == ((2, 3), Box((0, 0), (2, 3)))
    local[0, 0] = 7
    assert weight[0, 0] == 7 and not local.requires_grad
    assert get_local_slice(torch.tensor(3.0))[:2] == ((), Box((), ()))


def test_holding_counts_and_refuses_what_does_not_fit():
    whole = torch.zeros(4, 2, dtype=torch.bfloat16)
    two = ShardedState([held("w", whole, Box((0, 0), (1, 2))), held("w", whole, Box((3, 0), (1, 2)))])
    assert (two.numel, two.nbytes, len(two)) == (4, 8, 2)
    assert two.to_index()["w"].boxes == (Box((0, 0), (1, 2)), Box((3, 0), (1, 2)))
    assert two.get_shard("w", 1).box.offsets == (3, 0)
    with pytest.raises(ValueError, match=r"w: local tensor is float32 \[3\]"):
        StateShard("w", (4,), "float32", Box((0,), (4,)), torch.zeros(3))
    with pytest.raises(ValueError, match="two shapes"):
        ShardedState([StateShard.from_tensor("w", torch.zeros(3)), StateShard.from_tensor("w", torch.zeros(4))])
