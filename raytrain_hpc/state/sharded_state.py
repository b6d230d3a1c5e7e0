"""A rank's part of the training state as shards of global tensors: hashing in any layout, replica check."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.state.shard_index import ITEM_BYTES, Box, StateIndex, TensorSlices

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in an index: "float32", "bfloat16", ..."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class StateShard:
    """One slice of one tensor. `shape` is global; `tensor` is the local data, detached, of shape `box.sizes`.

    Raises ValueError if the local tensor does not match the box or the dtype, or if the box is outside the shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.box.sizes or get_dtype_name(self.tensor.dtype) != self.dtype:
            local = f"{get_dtype_name(self.tensor.dtype)} {list(self.tensor.shape)}"
            raise ValueError(f"{self.name}: local tensor is {local}, expected {self.dtype} {list(self.box.sizes)}")
        TensorSlices(self.name, self.shape, self.dtype, (self.box,))
        # Detached, so that autograd does not record in-place writes to a parameter.
        object.__setattr__(self, "tensor", self.tensor.detach())

    @classmethod
    def from_tensor(cls, name: str, tensor: torch.Tensor) -> StateShard:
        """Build the shard that this rank stores of `tensor`, a DTensor or a plain tensor. Shares memory.

        The shape of `tensor` is taken as global. A parameter that is part of a larger tensor (see `ShardSpec`) needs
        `training.state_builder.ParameterSlice`.
        """
        shape, box, local = get_local_slice(tensor)
        return cls(name, shape, get_dtype_name(local.dtype), box, local)

    @property
    def nbytes(self) -> int:
        """Bytes of the local data."""
        return self.box.numel * ITEM_BYTES[self.dtype]


class ShardedState:
    """A sequence of shards in a fixed order: the state of a rank, a part of it, or snapshots of several ranks.

    Box numbers count the shards of one name in that order.

    Raises ValueError if two shards of one name differ in global shape or dtype.
    """

    def __init__(self, shards: Iterable[StateShard] = ()) -> None:
        self.shards = tuple(shards)
        self._shards_by_name: dict[str, list[StateShard]] = {}
        for shard in self.shards:
            same_name = self._shards_by_name.setdefault(shard.name, [])
            same_name.append(shard)
            if (same_name[0].shape, same_name[0].dtype) != (shard.shape, shard.dtype):
                raise ValueError(f"{shard.name}: two shards differ in global shape or dtype")

    def __iter__(self) -> Iterator[StateShard]:
        return iter(self.shards)

    def __len__(self) -> int:
        return len(self.shards)

    def get_shard(self, name: str, box_number: int) -> StateShard:
        """Return the shard whose box is `to_index()[name].boxes[box_number]`."""
        return self._shards_by_name[name][box_number]

    def to_index(self) -> StateIndex:
        """Return the index of these shards: names, shapes, dtypes and boxes, without data."""
        return StateIndex(
            TensorSlices(name, same_name[0].shape, same_name[0].dtype, tuple(shard.box for shard in same_name))
            for name, same_name in self._shards_by_name.items()
        )

    @property
    def numel(self) -> int:
        """Number of elements in all shards."""
        return sum(shard.box.numel for shard in self.shards)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.nbytes for shard in self.shards)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of `tensor` that this rank stores, without a copy; a plain tensor is returned as it is.

    Not detached, unlike the result of `get_local_slice`.
    """
    to_local_method = getattr(tensor, "to_local", None)  # looked up by name: importing DTensor would cost 40 MiB
    return tensor if to_local_method is None else to_local_method()


def get_local_slice(tensor: torch.Tensor) -> tuple[tuple[int, ...], Box, torch.Tensor]:
    """Return (shape of the whole tensor, box of it on this rank, local tensor) of a DTensor or of a plain tensor.

    Under tensor or expert parallelism the whole tensor is itself a shard; `ShardSpec` maps its boxes to the global
    tensor. The mesh may have any number of dimensions. The box is empty if a dimension is split into more shards than
    it has rows and this rank gets none. The local tensor is detached and shares memory. Raises ValueError as
    `get_dtensor_slice` does.
    """
    shape = tuple(tensor.shape)
    if not hasattr(tensor, "placements"):
        return shape, Box.from_shape(shape), tensor.detach()
    from raytrain_hpc.state.dtensor import get_dtensor_slice  # lazy: ranks without DTensors save 40 MiB

    return get_dtensor_slice(tensor)


def compute_digest(state: ShardedState) -> int:
    """Compute a content hash that does not depend on the layout, 0 <= digest < 2**64.

    It is the sum, modulo 2**64, of a hash per element of (name, global shape, dtype, global index, bits). The digests
    of disjoint shards therefore add up to the digest of the whole tensor. Each element must be in `state` once. One
    changed element always changes the digest. Not cryptographic. Used to compare two runs (`raytrain-hpc drill`);
    `compute_checksum` is faster but compares equal layouts only.
    """
    total = 0
    for shard in state:
        if shard.box.numel:
            total += _digest_shard(shard)
    return total % 2**64


def _digest_shard(shard: StateShard) -> int:
    bits_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[ITEM_BYTES[shard.dtype]]
    bits = shard.tensor.contiguous().view(bits_dtype).reshape(-1)
    base, jumps = _compute_row_jumps(shard.box, shard.shape)
    identity = f"{shard.name} {shard.dtype} {list(shard.shape)}".encode()
    seed = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
    # On a CPU, a chunk and its temporaries fit into the L2 cache; a GPU is faster with large chunks.
    chunk_size = 2**16 if bits.device.type == "cpu" else 2**24
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    positions = torch.arange(min(chunk_size, bits.numel()), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), chunk_size):
        chunk = bits[start : start + chunk_size]
        local_index = positions[: chunk.numel()] + start
        key = local_index + base
        for period, jump in jumps:
            key += local_index.div(period, rounding_mode="floor").mul_(jump)
        key.mul_(_to_int64(0x9E3779B97F4A7C15)).add_(_to_int64(seed))
        # Not in place: for 8-byte elements, `chunk` is a view of the live state.
        key.add_(chunk.to(torch.int64) * _to_int64(0xD1B54A32D192ED03))
        total += _splitmix64(key).sum()
    return int(total) % 2**64


def _compute_row_jumps(box: Box, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """Compute how row-major position p in `box` maps to the global one: base + p + sum of p // period * jump.

    At the end of each local row, the global index jumps over the part of that row outside the box. Returns base and
    the (period, jump) pairs.
    """
    base, jumps = 0, []
    local_stride = global_stride = 1
    for offset, size, global_size in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        base += offset * global_stride
        local_stride *= size
        if size != global_size:
            jumps.append((local_stride, (global_size - size) * global_stride))
        global_stride *= global_size
    return base, [(period, jump) for period, jump in jumps if period < box.numel]


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """Apply the splitmix64 finalizer in place, a bijection on 64 bits. The masks make the right shifts logical."""
    x ^= (x >> 30).bitwise_and_(2**34 - 1)
    x *= _to_int64(0xBF58476D1CE4E5B9)
    x ^= (x >> 27).bitwise_and_(2**37 - 1)
    x *= _to_int64(0x94D049BB133111EB)
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def _to_int64(x: int) -> int:
    """Return the signed 64-bit integer with the same bits as x modulo 2**64."""
    x %= 2**64
    return x - 2**64 if x >= 2**63 else x


def compute_checksum(state: ShardedState) -> int:
    """Compute a checksum at memory bandwidth, 0 <= sum < 2**64, to compare ranks that hold the same shards.

    The 64-bit words of each shard are summed, and each shard's sum is weighted by an odd number that depends on its
    position; all modulo 2**64. One changed word is always detected, several unless their changes cancel. Words that
    swap places within a shard are not detected.
    """
    total = 0
    for position, shard in enumerate(state):
        flat = shard.tensor.contiguous().reshape(-1).view(torch.uint8)
        if flat.storage_offset() % 8:
            flat = flat.clone()
        aligned_bytes = flat.numel() // 8 * 8
        word_sum = int(flat[:aligned_bytes].view(torch.int64).sum()) + int.from_bytes(
            bytes(flat[aligned_bytes:].tolist()), "little"
        )
        total += (2 * position + 1) * word_sum
    return total % 2**64


def find_divergent_ranks(state: ShardedState, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """Return the group ranks whose checksum differs from that of the majority; empty if all replicas are equal.

    All ranks must hold the same boxes in the same order. Called by `ReplicaCheck` after loading and,
    unless `fault.replica_check_interval` is 0, every `fault.replica_check_interval` steps and before checkpoints.

    Without a majority, the most frequent content is the reference, and the lowest rank's on a tie. Collective;
    `device` is the device on which the group communicates.
    """
    own_fingerprint = torch.tensor([_to_int64(compute_checksum(state))], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own_fingerprint) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own_fingerprint, group=group)
    fingerprints = [int(fingerprint) for fingerprint in gathered]
    # Counter keeps the first-seen order among equal counts, so the lowest rank's content wins a tie.
    reference, _ = Counter(fingerprints).most_common(1)[0]
    return [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != reference]
