"""The tensors behind a state index: what this rank holds, copied, hashed and compared without knowing the layout."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.state.shard_index import ITEM_BYTES, Box, StateIndex, TensorSlices, plan_copies

BUCKET_BYTES = 25 * 2**20
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def dtype_name(dtype: torch.dtype) -> str:
    """The index's name of a torch dtype: "float32", "bfloat16", ..."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class StateShard:
    """One slice of one tensor. `shape` is global; `tensor` is the local data, of shape `box.sizes`, kept detached.

    Raises ValueError where the local tensor does not fit the box or the dtype, or where the box lies outside.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.box.sizes or dtype_name(self.tensor.dtype) != self.dtype:
            local = f"{dtype_name(self.tensor.dtype)} {list(self.tensor.shape)}"
            raise ValueError(f"{self.name}: local tensor is {local}, the box says {self.dtype} {list(self.box.sizes)}")
        TensorSlices(self.name, self.shape, self.dtype, (self.box,))
        # Filling a parameter in place is no part of any graph.
        object.__setattr__(self, "tensor", self.tensor.detach())

    @classmethod
    def from_tensor(cls, name: str, tensor: torch.Tensor) -> StateShard:
        """What this rank holds of `tensor`, a DTensor or a plain (whole) tensor. Shares its memory."""
        shape, box, local = get_local_slice(tensor)
        return cls(name, shape, dtype_name(local.dtype), box, local)

    @property
    def nbytes(self) -> int:
        """Bytes of the local data."""
        return self.box.numel * ITEM_BYTES[self.dtype]


class ShardedState:
    """All slices that a rank holds, in a fixed order. Box numbers count a name's slices in that order.

    Raises ValueError where two slices of one name disagree on shape or dtype.
    """

    def __init__(self, shards: Iterable[StateShard] = ()) -> None:
        self.shards = tuple(shards)
        self._shards_by_name: dict[str, list[StateShard]] = {}
        for held in self.shards:
            same = self._shards_by_name.setdefault(held.name, [])
            same.append(held)
            if (same[0].shape, same[0].dtype) != (held.shape, held.dtype):
                raise ValueError(f"{held.name} is held with two shapes or dtypes")

    def __iter__(self) -> Iterator[StateShard]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)

    def get_shard(self, name: str, box_number: int) -> StateShard:
        """The slice with this box number in `index()`."""
        return self._shards_by_name[name][box_number]

    def to_index(self) -> StateIndex:
        """The same as plain data."""
        return StateIndex(
            TensorSlices(name, same[0].shape, same[0].dtype, tuple(held.box for held in same))
            for name, same in self._shards_by_name.items()
        )

    @property
    def numel(self) -> int:
        """Elements held."""
        return sum(held.box.numel for held in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(held.nbytes for held in self.shards)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank stores, without a copy."""
    to_local = getattr(tensor, "to_local", None)  # a DTensor's; importing the class would cost 40 MiB
    return tensor if to_local is None else to_local()


def get_local_slice(tensor: torch.Tensor) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """(global shape, box held by this rank, local tensor) of a DTensor on a mesh of any dimension, or a plain tensor.

    The box may be empty where a dimension is cut into more parts than it has rows. The local tensor is detached and
    shares memory. Raises ValueError for a partial sum, for a rank outside the mesh, and for rows that are not adjacent.
    """
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return shape, Box.from_shape(shape), tensor.detach()
    from raytrain_hpc.state.dtensor import get_dtensor_slice  # 40 MiB that a rank without shards does not pay

    return get_dtensor_slice(tensor)


def copy_overlap(source: ShardedState, destination: ShardedState) -> int:
    """Fill `destination` in place from `source` as far as it reaches, across devices too. Returns elements copied.

    What must be covered is for the caller to check, with `state.index.missing`. Raises ValueError where the two
    disagree on a tensor.
    """
    copied = 0
    for piece in plan_copies(source.to_index(), destination.to_index()):
        origin, target = (
            source.get_shard(piece.name, piece.source_box),
            destination.get_shard(piece.name, piece.destination_box),
        )
        if (origin.shape, origin.dtype) != (target.shape, target.dtype):
            raise ValueError(
                f"{piece.name} is {origin.dtype} {origin.shape} here and {target.dtype} {target.shape} there"
            )
        target.tensor[piece.destination_slices].copy_(origin.tensor[piece.source_slices])
        copied += piece.region.numel
    return copied


def compute_digest(state: ShardedState) -> int:
    """Content hash, 0 <= digest < 2**64, that does not depend on the layout.

    A sum over elements, modulo 2**64, of a hash of (name, global shape, dtype, global index, bits). So the digests of
    disjoint slices add up to the digest of the whole, and replicas are equal when their digests are. Any one changed
    element changes it. Not cryptographic.
    """
    total = 0
    for held in state:
        if held.box.numel:
            total += _digest_shard(held)
    return total % 2**64


def _digest_shard(shard: StateShard) -> int:
    bits_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEM_BYTES[shard.dtype]]
    bits = shard.tensor.contiguous().view(bits_type).reshape(-1)
    base, jumps = _compute_row_jumps(shard.box, shard.shape)
    identity = f"{shard.name} {shard.dtype} {list(shard.shape)}".encode()
    seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
    # On a CPU the chunk and its temporaries stay in the second-level cache; a GPU wants large ones.
    chunk = 2**16 if bits.device.type == "cpu" else 2**24
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    position = torch.arange(min(chunk, bits.numel()), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), chunk):
        part = bits[start : start + chunk]
        flat = position[: part.numel()] + start
        key = flat + base
        for period, jump in jumps:
            key += flat.div(period, rounding_mode="floor").mul_(jump)
        key.mul_(_to_int64(0x9E3779B97F4A7C15)).add_(_to_int64(seed))
        # Not in place: for 8-byte elements `part` is the live state itself.
        key.add_(part.to(torch.int64) * _to_int64(0xD1B54A32D192ED03))
        total += _splitmix64(key).sum()
    return int(total) % 2**64


def _compute_row_jumps(box: Box, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """How the row-major position p inside `box` maps to the global one: base + p + sum of p // period * jump.

    Each time a local row ends, the global index jumps over what other ranks hold of that row.
    """
    base, jumps = 0, []
    local_stride = global_stride = 1
    for offset, size, full in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        base += offset * global_stride
        local_stride *= size
        if size != full:
            jumps.append((local_stride, (full - size) * global_stride))
        global_stride *= full
    return base, [(period, jump) for period, jump in jumps if period < box.numel]


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, in place; a bijection on 64 bits. The masks make >> a shift of unsigned numbers."""
    x ^= (x >> 30).bitwise_and_(2**34 - 1)
    x *= _to_int64(0xBF58476D1CE4E5B9)
    x ^= (x >> 27).bitwise_and_(2**37 - 1)
    x *= _to_int64(0x94D049BB133111EB)
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def _to_int64(x: int) -> int:
    """The int64 with the same 64 bits."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


def broadcast_state(state: ShardedState, source_rank: int, group: dist.ProcessGroup) -> None:
    """Overwrite every rank's slices in place with those of `source_rank`, a rank within `group`.

    Collective: every rank of the group must hold the same names and boxes in the same order.
    """
    is_source = dist.get_rank(group) == source_rank
    for bucket in _iter_buckets(state):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.broadcast(bucket[0], group=group, group_src=source_rank)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=source_rank)
        if is_source:
            continue
        for tensor, part in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _iter_buckets(state: ShardedState) -> Iterator[list[torch.Tensor]]:
    """The non-empty local tensors grouped by dtype and device into about BUCKET_BYTES each; a larger one stays alone.

    The order is the same on every rank.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for held in state:
        if not held.box.numel:
            continue
        if held.nbytes >= BUCKET_BYTES:
            yield [held.tensor]
            continue
        key = (held.tensor.dtype, held.tensor.device)
        bucket = open_buckets.setdefault(key, [])
        bucket.append(held.tensor)
        if sum(tensor.nbytes for tensor in bucket) >= BUCKET_BYTES:
            yield open_buckets.pop(key)
    yield from open_buckets.values()


def compute_fingerprint(state: ShardedState) -> int:
    """A sum over all bits at the speed of memory, 0 <= sum < 2**64, to compare ranks that hold the same slices.

    Every slice's 64-bit words are added up, modulo 2**64, and weighted by an odd number of the slice's own. So one
    changed word always shows, and several do unless their changes happen to cancel; words that swap places do not.
    """
    total = 0
    for number, held in enumerate(state):
        flat = held.tensor.contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        whole = flat.numel() // 8 * 8
        words = int(flat[:whole].view(torch.int64).sum()) + int.from_bytes(bytes(flat[whole:].tolist()), "little")
        total += (2 * number + 1) * words
    return total % 2**64


def find_divergent_replicas(state: ShardedState, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Ranks within `group` whose content differs from the majority's; empty when all replicas are equal.

    Where no content has a majority, the most frequent one counts, and the lowest rank's among equals. Collective:
    `device` is where the group communicates.
    """
    mine = torch.tensor([_to_int64(compute_fingerprint(state))], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    prints = [int(one) for one in gathered]
    # Counter keeps first-seen order among equal counts: the lowest rank's content wins a tie.
    reference, _ = Counter(prints).most_common(1)[0]
    return [rank for rank, other in enumerate(prints) if other != reference]
