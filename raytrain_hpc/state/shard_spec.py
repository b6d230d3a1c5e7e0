"""How the tensor that a rank computes with is made of parts of a global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_hpc.state.shard_index import Box


@dataclass(frozen=True, slots=True)
class SliceMapping:
    """One region: where it lies in the global tensor, and where in the rank's own. Both boxes are of one size."""

    global_box: Box
    local_box: Box

    def __post_init__(self) -> None:
        if self.global_box.sizes != self.local_box.sizes:
            raise ValueError(f"a part is {self.global_box} of the whole and {self.local_box} of the rank's tensor")

    def restrict(self, box: Box) -> SliceMapping:
        """What `box` of the rank's tensor holds of it, seen from the corner of that box; it may be empty."""
        common = self.local_box.intersection(box)
        shift = tuple(start - own for start, own in zip(common.offsets, self.local_box.offsets, strict=True))
        offsets = tuple(base + by for base, by in zip(self.global_box.offsets, shift, strict=True))
        corner = tuple(start - base for start, base in zip(common.offsets, box.offsets, strict=True))
        return SliceMapping(Box(offsets, common.sizes), Box(corner, common.sizes))


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """A global tensor by its canonical name and shape, and the parts of it that make up a rank's tensor."""

    name: str
    shape: tuple[int, ...]
    mappings: tuple[SliceMapping, ...]

    @classmethod
    def from_shape(cls, name: str, shape: Sequence[int]) -> ShardSpec:
        """All of it."""
        box = Box.from_shape(shape)
        return cls(name, tuple(shape), (SliceMapping(box, box),))

    @classmethod
    def from_ranges(cls, name: str, shape: Sequence[int], dim: int, ranges: Sequence[range]) -> ShardSpec:
        """These spans of one dimension, one behind the other, and all of the others."""
        parts, start = [], 0
        for span in ranges:
            sizes = (*shape[:dim], len(span), *shape[dim + 1 :])
            at, own = [0] * len(shape), [0] * len(shape)
            at[dim], own[dim] = span.start, start
            parts.append(SliceMapping(Box(tuple(at), sizes), Box(tuple(own), sizes)))
            start += len(span)
        return cls(name, tuple(shape), tuple(parts))

    def restrict(self, box: Box) -> tuple[SliceMapping, ...]:
        """The parts that lie in `box` of the rank's tensor, seen from the corner of that box; none that is empty."""
        return tuple(part for part in (part.restrict(box) for part in self.mappings) if part.local_box.numel)
