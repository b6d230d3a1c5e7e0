"""The mapping between a parameter after tensor, expert or tile sharding (the local tensor) and the global tensor.

FSDP may shard the local tensor further; `ShardSpec.restrict_mappings` gives the regions that are left to a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_hpc.state.shard_index import Box


@dataclass(frozen=True, slots=True)
class SliceMapping:
    """One region, as a box of the global tensor and as the box of equal size in the rank's local tensor.

    Raises ValueError if the two boxes differ in size.
    """

    global_box: Box
    local_box: Box

    def __post_init__(self) -> None:
        if self.global_box.sizes != self.local_box.sizes:
            raise ValueError(f"global box {self.global_box} and local box {self.local_box} differ in size")

    def restrict(self, box: Box) -> SliceMapping:
        """Return the part of this mapping that lies in `box` of the local tensor; possibly empty.

        The new local box is relative to the corner of `box`.
        """
        common = self.local_box.intersection(box)
        shift = tuple(start - base for start, base in zip(common.offsets, self.local_box.offsets, strict=True))
        offsets = tuple(base + delta for base, delta in zip(self.global_box.offsets, shift, strict=True))
        corner = tuple(start - base for start, base in zip(common.offsets, box.offsets, strict=True))
        return SliceMapping(Box(offsets, common.sizes), Box(corner, common.sizes))


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The canonical name and shape of a global tensor, and the mappings of its slices that form a local tensor.

    A canonical name has no kind: "layers.0.attention.qkv.weight", which a state index lists as "model.layers.0...".
    """

    name: str
    shape: tuple[int, ...]
    mappings: tuple[SliceMapping, ...]

    @classmethod
    def from_shape(cls, name: str, shape: Sequence[int]) -> ShardSpec:
        """Build the spec of a local tensor that is the whole global tensor."""
        box = Box.from_shape(shape)
        return cls(name, tuple(shape), (SliceMapping(box, box),))

    @classmethod
    def from_ranges(cls, name: str, shape: Sequence[int], dim: int, ranges: Sequence[range]) -> ShardSpec:
        """Build the spec of a local tensor that concatenates these ranges of `dim`, each of step 1, in order.

        The other dimensions are complete.
        """
        mappings, local_start = [], 0
        for global_range in ranges:
            sizes = (*shape[:dim], len(global_range), *shape[dim + 1 :])
            global_offsets, local_offsets = [0] * len(shape), [0] * len(shape)
            global_offsets[dim], local_offsets[dim] = global_range.start, local_start
            mappings.append(SliceMapping(Box(tuple(global_offsets), sizes), Box(tuple(local_offsets), sizes)))
            local_start += len(global_range)
        return cls(name, tuple(shape), tuple(mappings))

    def restrict_mappings(self, box: Box) -> tuple[SliceMapping, ...]:
        """Return the non-empty mappings that lie in `box` of the local tensor, relative to the corner of `box`.

        `box`: the rows that FSDP leaves on this rank, or a tile.
        """
        return tuple(
            mapping for mapping in (mapping.restrict(box) for mapping in self.mappings) if mapping.local_box.numel
        )
