"""Who holds which part of which tensor, as plain data: the layout-neutral identity of a training state.

A tensor is known by its canonical name ("model.layers.0.attn.qkv.weight", "optimizer.exp_avg.<parameter>"), its global
shape and its dtype. What a rank, a checkpoint file or a snapshot holds of it is a set of boxes in global coordinates.
Checkpoint, snapshot, reshard and replica check are all functions of two such indexes. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, for every dtype a state may hold."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An n-dimensional region: `offsets` and `sizes` in elements, one a dimension. A scalar is `Box((), ())`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"box has {len(self.offsets)} offsets and {len(self.sizes)} sizes")
        if min(self.offsets + self.sizes, default=0) < 0:
            raise ValueError(f"box has a negative offset or size: {self.offsets}, {self.sizes}")

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> Box:
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements inside; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last coordinate in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(end <= size for end, size in zip(self.ends, shape, strict=True))

    def intersection(self, other: Box) -> Box:
        """The region that both cover; `numel` is 0 where there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(max(0, end - start) for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return Box(starts, sizes)

    def difference(self, other: Box) -> list[Box]:
        """What is left of this box where `other` is cut out: disjoint boxes, at most two a dimension."""
        common = self.intersection(other)
        if not common.numel:
            return [self] if self.numel else []
        left = []
        core = self
        for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            left += [core._narrow(dim, core.offsets[dim], start), core._narrow(dim, end, core.ends[dim])]
            core = core._narrow(dim, start, end)
        return [box for box in left if box.numel]

    def _narrow(self, dim: int, start: int, end: int) -> Box:
        """This box with dimension `dim` narrowed to the coordinates [start, end)."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = start, end - start
        return Box(tuple(offsets), tuple(sizes))

    def to_slices(self, outer: Box) -> tuple[slice, ...]:
        """This region as slices of the local tensor that holds `outer`."""
        starts = [mine - base for mine, base in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def __str__(self) -> str:
        spans = (f"{offset}:{end}" for offset, end in zip(self.offsets, self.ends, strict=True))
        return f"[{','.join(spans)}]"


@dataclass(frozen=True, slots=True)
class TensorSlices:
    """The boxes held of one tensor. `shape` is the global shape, `dtype` a key of ITEM_BYTES."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is none of {', '.join(ITEM_BYTES)}")
        for box in self.boxes:
            if not box.is_inside(self.shape):
                raise ValueError(f"{self.name}: box {box} does not lie in shape {self.shape}")


class StateIndex(Mapping[str, TensorSlices]):
    """Canonical name -> what is held of that tensor, in the order given. Immutable.

    Raises ValueError where a name occurs twice.
    """

    def __init__(self, tensors: Iterable[TensorSlices] = ()) -> None:
        self._tensors: dict[str, TensorSlices] = {}
        for tensor in tensors:
            if tensor.name in self._tensors:
                raise ValueError(f"{tensor.name} occurs twice in a state index")
            self._tensors[tensor.name] = tensor

    def __getitem__(self, name: str) -> TensorSlices:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"StateIndex({list(self._tensors.values())!r})"

    def select(self, names: Iterable[str]) -> StateIndex:
        """The part of this index with these names; names it does not hold are left out."""
        return StateIndex(self[name] for name in names if name in self)

    def to_json(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers: {name: {shape, dtype, boxes: [[offsets, sizes], ...]}}."""
        return {
            tensor.name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "boxes": [[list(box.offsets), list(box.sizes)] for box in tensor.boxes],
            }
            for tensor in self.values()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateIndex:
        """The inverse of `to_json`. Raises ValueError, KeyError or TypeError where `data` is no index."""
        return cls(
            TensorSlices(
                name,
                tuple(map(int, entry["shape"])),
                entry["dtype"],
                tuple(Box(tuple(map(int, offsets)), tuple(map(int, sizes))) for offsets, sizes in entry["boxes"]),
            )
            for name, entry in data.items()
        )


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """One region to move. `source` and `destination` are box numbers in the two indexes' entries for `name`."""

    name: str
    source_box: int
    destination_box: int
    region: Box
    source_slices: tuple[slice, ...]
    destination_slices: tuple[slice, ...]


def merge_indexes(indexes: Iterable[StateIndex]) -> StateIndex:
    """All that these indexes hold together, each distinct box once, empty boxes left out.

    Raises ValueError naming the first tensor on whose shape or dtype two of them disagree.
    """
    first: dict[str, TensorSlices] = {}
    boxes: dict[str, dict[Box, None]] = {}
    for index in indexes:
        for tensor in index.values():
            known = first.setdefault(tensor.name, tensor)
            if difference := _find_tensor_difference(known, tensor):
                raise ValueError(difference)
            held = (box for box in tensor.boxes if box.numel)
            boxes.setdefault(tensor.name, {}).update(dict.fromkeys(held))
    return StateIndex(TensorSlices(name, t.shape, t.dtype, tuple(boxes[name])) for name, t in first.items())


def plan_copies(source: StateIndex, destination: StateIndex) -> list[RegionCopy]:
    """The pieces that fill `destination` from `source`, each element of the destination at most once.

    Where source boxes overlap (replicas) the first one serves. Names that only one side holds give no piece.
    """
    pieces = []
    for tensor in destination.values():
        source_boxes = source[tensor.name].boxes if tensor.name in source else ()
        for number, box in enumerate(tensor.boxes):
            found, _ = _cover(box, source_boxes)
            pieces += [
                RegionCopy(
                    tensor.name, origin, number, region, region.to_slices(source_boxes[origin]), region.to_slices(box)
                )
                for origin, region in found
            ]
    return pieces


def plan_copies_from_ranks(
    sources: Sequence[StateIndex], destination: StateIndex, first_source: int = 0
) -> tuple[list[tuple[int, RegionCopy]], list[tuple[str, Box]]]:
    """Who gives what: (number of the offer, piece) pairs that fill `wanted`, and the regions that nobody offers.

    Offer `first` serves as far as it reaches, then the one after it, and so on around: with `first` the number of the
    one who wants, ranks that need the same take it from different neighbours.
    """
    order = [(first_source + turn) % len(sources) for turn in range(len(sources))]
    found, lost = [], []
    for tensor in destination.values():
        there = [
            (offer, number, box)
            for offer in order
            if tensor.name in sources[offer]
            for number, box in enumerate(sources[offer][tensor.name].boxes)
        ]
        for target, box in enumerate(tensor.boxes):
            covered, left = _cover(box, [one for _, _, one in there])
            lost += [(tensor.name, region) for region in left]
            for number, region in covered:
                offer, source, held = there[number]
                slices = region.to_slices(held), region.to_slices(box)
                found.append((offer, RegionCopy(tensor.name, source, target, region, *slices)))
    return found, lost


def find_missing(sources: Iterable[StateIndex], destination: StateIndex) -> list[tuple[str, Box]]:
    """The regions of `destination`, in global coordinates, that none of `sources` covers; empty when all is there.

    Raises ValueError where two sources disagree on a tensor.
    """
    source = merge_indexes(sources)
    regions = []
    for tensor in destination.values():
        source_boxes = source[tensor.name].boxes if tensor.name in source else ()
        for box in tensor.boxes:
            regions += [(tensor.name, region) for region in _cover(box, source_boxes)[1]]
    return regions


def find_difference(a: StateIndex, b: StateIndex) -> str | None:
    """The first difference in names, global shapes or dtypes, as text for an error; None when there is none.

    Said of `a`: a name that only `b` has "is missing", one that only `a` has "is unknown". Boxes are not compared: two
    layouts of one state are equal. To ask only for what `b` holds, compare `a.only(b)` with `b`. A tensor without
    elements has no box that anybody could write, so its absence is no difference.
    """
    for name, tensor in b.items():
        if name not in a and 0 not in tensor.shape:
            return f"{name} is missing"
    for name, tensor in a.items():
        if name not in b:
            if 0 not in tensor.shape:
                return f"{name} is unknown"
        elif difference := _find_tensor_difference(tensor, b[name]):
            return difference
    return None


def find_owned_regions(
    indexes: Sequence[StateIndex], rank: int, names: Iterable[str]
) -> dict[str, list[tuple[int, Box]]]:
    """Of these names, what rank `rank` holds and no lower rank does: (box number, region) pairs in global coordinates.

    Over all ranks the regions tile what is held. Within one rank the earlier box counts.
    """
    regions: dict[str, list[tuple[int, Box]]] = {}
    for name in names:
        taken = [box for lower in indexes[:rank] if name in lower for box in lower[name].boxes]
        mine = regions.setdefault(name, [])
        for number, box in enumerate(indexes[rank][name].boxes if name in indexes[rank] else ()):
            mine += [(number, region) for region in _cover(box, taken)[1]]
            taken.append(box)
    return regions


def assign_writers(indexes: Sequence[StateIndex]) -> list[list[tuple[str, int]]]:
    """Who writes what: for each rank the (name, box number) it writes, each distinct box by exactly one holder.

    `indexes[r]` is what rank r holds. Largest boxes first, each to its holder with the fewest bytes so far (the lower
    rank on a tie): the same on every caller, whatever the order of names. Empty boxes are written by nobody.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for rank, index in enumerate(indexes):
        for tensor in index.values():
            for number, box in enumerate(tensor.boxes):
                places = holders.setdefault((tensor.name, box), [])
                if box.numel and (not places or places[-1][0] != rank):
                    places.append((rank, number))
    size = {
        (name, box): box.numel * ITEM_BYTES[indexes[places[0][0]][name].dtype]
        for (name, box), places in holders.items()
        if places
    }
    load = [0] * len(indexes)
    writes: list[list[tuple[str, int]]] = [[] for _ in indexes]
    for key in sorted(size, key=lambda key: (-size[key], key)):
        rank, number = min(holders[key], key=lambda place: (load[place[0]], place[0]))
        load[rank] += size[key]
        writes[rank].append((key[0], number))
    return writes


def _cover(box: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Tile `box` with `sources`, the earlier ones first: (source number, region) pairs, and what none covers."""
    found: list[tuple[int, Box]] = []
    left = [box] if box.numel else []
    for number, source in enumerate(sources):
        if not left:
            break
        if not found and source == box:  # of replicas and shards alike the commonest case, and a large world has many
            return [(number, box)], []
        if not box.intersection(source).numel:
            continue
        uncovered = []
        for part in left:
            common = part.intersection(source)
            if common.numel:
                found.append((number, common))
            uncovered += part.difference(source)
        left = uncovered
    return found, left


def _find_tensor_difference(a: TensorSlices, b: TensorSlices) -> str | None:
    if a.shape != b.shape:
        return f"{a.name} has shape {list(a.shape)}, not {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.name} has dtype {a.dtype}, not {b.dtype}"
    return None
