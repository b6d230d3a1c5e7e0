"""How the tensor that a rank computes with is made of parts of a global one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_hpc.state.shard_index import Box


@dataclass(frozen=True, slots=True)
class Part:
    """One region: where it lies in the global tensor, and where in the rank's own. Both boxes are of one size."""

    whole: Box
    own: Box

    def __post_init__(self) -> None:
        if self.whole.sizes != self.own.sizes:
            raise ValueError(f"a part is {self.whole} of the whole and {self.own} of the rank's tensor")

    def within(self, box: Box) -> Part:
        """What `box` of the rank's tensor holds of it, seen from the corner of that box; it may be empty."""
        common = self.own.intersection(box)
        shift = tuple(start - own for start, own in zip(common.offsets, self.own.offsets, strict=True))
        offsets = tuple(base + by for base, by in zip(self.whole.offsets, shift, strict=True))
        corner = tuple(start - base for start, base in zip(common.offsets, box.offsets, strict=True))
        return Part(Box(offsets, common.sizes), Box(corner, common.sizes))


@dataclass(frozen=True, slots=True)
class Cut:
    """A global tensor by its canonical name and shape, and the parts of it that make up a rank's tensor."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Cut:
        """All of it."""
        box = Box.whole(shape)
        return cls(name, tuple(shape), (Part(box, box),))

    @classmethod
    def along(cls, name: str, shape: Sequence[int], dim: int, spans: Sequence[range]) -> Cut:
        """These spans of one dimension, one behind the other, and all of the others."""
        parts, start = [], 0
        for span in spans:
            sizes = (*shape[:dim], len(span), *shape[dim + 1 :])
            at, own = [0] * len(shape), [0] * len(shape)
            at[dim], own[dim] = span.start, start
            parts.append(Part(Box(tuple(at), sizes), Box(tuple(own), sizes)))
            start += len(span)
        return cls(name, tuple(shape), tuple(parts))

    def within(self, box: Box) -> tuple[Part, ...]:
        """The parts that lie in `box` of the rank's tensor, seen from the corner of that box; none that is empty."""
        return tuple(part for part in (part.within(box) for part in self.parts) if part.own.numel)
