"""Digests, resharding in memory and slices, compared with whole tensors and with Python integers."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import (
    ShardedState,
    StateShard,
    compute_checksum,
    compute_digest,
    get_local_slice,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def make_shard(name, tensor, box):
    """Return the shard of `tensor` in `box`, as a copy."""
    shape = tuple(tensor.shape)
    local = tensor[box.to_slices(Box.from_shape(shape))].clone()
    return StateShard(name, shape, str(tensor.dtype).removeprefix("torch."), box, local)


def random_tensor(rng, shape, dtype):
    torch.manual_seed(rng.randrange(2**31))
    return (torch.randn(shape, dtype=torch.float64) * 1000).to(dtype)


def random_tiling(rng, box, depth):
    """Split a box at random positions in random dimensions into 2**depth boxes, some of them empty."""
    if depth == 0 or not box.sizes:
        return [box]
    dim = rng.randrange(len(box.sizes))
    position = rng.randint(0, box.sizes[dim])
    first, second = list(box.sizes), list(box.sizes)
    first[dim], second[dim] = position, box.sizes[dim] - position
    start = list(box.offsets)
    start[dim] += position
    return random_tiling(rng, Box(box.offsets, tuple(first)), depth - 1) + random_tiling(
        rng, Box(tuple(start), tuple(second)), depth - 1
    )


def reference_digest(name, tensor):
    """Compute the digest by its definition, one element at a time in Python integers."""
    mask = 2**64 - 1
    dtype = str(tensor.dtype).removeprefix("torch.")
    identity = f"{name} {dtype} {list(tensor.shape)}".encode()
    seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
    bits_dtype = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.element_size()]
    total = 0
    for position, bits in enumerate(tensor.reshape(-1).view(bits_dtype).tolist()):
        x = (position * 0x9E3779B97F4A7C15 + seed + bits * 0xD1B54A32D192ED03) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        total += x ^ (x >> 31)
    return total & mask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_equals_its_definition(dtype):
    tensor = random_tensor(random.Random(1), (5, 3, 4), dtype)
    before = tensor.clone()
    assert compute_digest(ShardedState([StateShard.from_tensor("a.b", tensor)])) == reference_digest("a.b", before)
    assert torch.equal(tensor, before), "hashing must not change the state"


@pytest.mark.parametrize("seed", range(25))
def test_digests_of_any_sharding_add_up_to_that_of_the_whole_tensor(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 9) for _ in range(seed % 5))
    tensor = random_tensor(rng, shape, DTYPES[seed % 4])
    boxes = random_tiling(rng, Box.from_shape(shape), 4)
    total = sum(compute_digest(ShardedState([make_shard("w", tensor, box)])) for box in boxes)
    assert total % 2**64 == compute_digest(ShardedState([StateShard.from_tensor("w", tensor)]))


def test_digest_does_not_depend_on_chunks_or_memory_order():
    tensor = torch.randn(300, 700)
    expected = compute_digest(ShardedState([StateShard.from_tensor("w", tensor)]))
    columns = [make_shard("w", tensor, Box((0, a), (300, b - a))) for a, b in [(0, 1), (1, 333), (333, 700)]]
    assert sum(compute_digest(ShardedState([shard])) for shard in columns) % 2**64 == expected
    column_major = tensor.t().contiguous().t()
    assert compute_digest(ShardedState([StateShard.from_tensor("w", column_major)])) == expected


def test_digest_detects_a_bit_a_swap_a_name_a_shape_and_a_sign():
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    pair = [StateShard.from_tensor("a", tensor), StateShard.from_tensor("b", tensor + 1)]
    digests = {compute_digest(ShardedState(pair))}
    flipped = tensor.clone()
    flipped.view(torch.int32)[1, 2] ^= 1
    swapped = tensor.clone()
    swapped[0, 0], swapped[2, 3] = tensor[2, 3].clone(), tensor[0, 0].clone()
    negative_zero = tensor.clone()
    negative_zero[0, 0] = -0.0
    for changed in (flipped, swapped, negative_zero, tensor.t().contiguous(), tensor.reshape(4, 3)):
        digests.add(compute_digest(ShardedState([StateShard.from_tensor("a", changed), pair[1]])))
    renamed = [StateShard.from_tensor("b", tensor), StateShard.from_tensor("a", tensor + 1)]
    digests.add(compute_digest(ShardedState(renamed)))
    assert len(digests) == 7


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
def test_fingerprint_detects_every_flipped_bit(length: int, dtype: torch.dtype) -> None:
    """The tensor starts at an address that is not aligned to 64 bits."""
    storage = torch.arange(length + 1).to(dtype)
    tensor = storage[1:]
    state = ShardedState([StateShard.from_tensor("a", tensor), StateShard.from_tensor("b", torch.ones(3))])
    before = compute_checksum(state)
    flat = tensor.view(torch.uint8)
    for byte in range(0, len(flat), max(1, len(flat) // 40)):
        for bit in range(8):
            flat[byte] ^= 1 << bit
            assert compute_checksum(state) != before
            flat[byte] ^= 1 << bit
    assert compute_checksum(state) == before
    assert compute_checksum(ShardedState(list(state)[::-1])) != before


@pytest.mark.parametrize("seed", range(15))
def test_resharding_in_memory_is_bit_identical(seed):
    rng = random.Random(100 + seed)
    shape = tuple(rng.randint(1, 9) for _ in range(seed % 4))
    tensor = random_tensor(rng, shape, DTYPES[seed % 4])
    source = ShardedState(make_shard("w", tensor, box) for box in random_tiling(rng, Box.from_shape(shape), 3))
    for box in random_tiling(rng, Box.from_shape(shape), 2):
        target = make_shard("w", torch.zeros_like(tensor), box)
        assert reshard_state(ShardedState([target]), source, None, torch.device("cpu")) == 0, "nothing is received"
        assert torch.equal(target.tensor, tensor[box.to_slices(Box.from_shape(shape))])


def test_the_slice_of_a_plain_tensor_is_the_whole_and_shares_memory():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    shape, box, local = get_local_slice(weight)
    assert (shape, box) == ((2, 3), Box((0, 0), (2, 3)))
    local[0, 0] = 7
    assert weight[0, 0] == 7 and not local.requires_grad
    assert get_local_slice(torch.tensor(3.0))[:2] == ((), Box((), ()))


def test_a_sharded_state_counts_its_shards_and_refuses_inconsistent_ones():
    tensor = torch.zeros(4, 2, dtype=torch.bfloat16)
    state = ShardedState([make_shard("w", tensor, Box((0, 0), (1, 2))), make_shard("w", tensor, Box((3, 0), (1, 2)))])
    assert (state.numel, state.nbytes, len(state)) == (4, 8, 2)
    assert state.to_index()["w"].boxes == (Box((0, 0), (1, 2)), Box((3, 0), (1, 2)))
    assert state.get_shard("w", 1).box.offsets == (3, 0)
    with pytest.raises(ValueError, match=r"w: local tensor is float32 \[3\]"):
        StateShard("w", (4,), "float32", Box((0,), (4,)), torch.zeros(3))
    with pytest.raises(ValueError, match="two shards differ in global shape"):
        ShardedState([StateShard.from_tensor("w", torch.zeros(3)), StateShard.from_tensor("w", torch.zeros(4))])
