"""State index: which slices of which global tensors a rank, a checkpoint or a snapshot holds. Without tensor content.

A tensor is identified by its name, its global shape and its dtype. The name is KIND.CANONICAL_NAME for weights and
buffers ("model.layers.0.attention.qkv.weight") and for moments ("optimizer.exp_avg.layers.0.attention.qkv.weight");
other state, such as recent losses, has a name of its own. Slices are boxes in global coordinates. Resharding,
checkpoint reads and writes, the layout of a snapshot and the gradient norm are all computed from indexes. Plain data,
standard library only.
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
"""Bytes per element, for every dtype that a state may have."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An n-dimensional region: `offsets` and `sizes` in elements, one per dimension. A scalar is `Box((), ())`.

    Raises ValueError if the two differ in length or hold a negative number.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes):
            raise ValueError(f"box has {len(self.offsets)} offsets and {len(self.sizes)} sizes")
        if min(self.offsets + self.sizes, default=0) < 0:
            raise ValueError(f"box has a negative offset or size: {self.offsets}, {self.sizes}")

    @classmethod
    def from_shape(cls, shape: Sequence[int]) -> Box:
        """Build the box that covers a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last coordinate, per dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def is_inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box lies within a tensor of this shape."""
        return len(shape) == len(self.sizes) and all(end <= size for end, size in zip(self.ends, shape, strict=True))

    def intersection(self, other: Box) -> Box:
        """Return the region in both boxes; its `numel` is 0 if they are disjoint."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sizes = tuple(max(0, end - start) for start, end in zip(starts, map(min, self.ends, other.ends), strict=True))
        return Box(starts, sizes)

    def difference(self, other: Box) -> list[Box]:
        """Return the region of this box outside `other`, as disjoint boxes: at most two per dimension, none empty."""
        common = self.intersection(other)
        if not common.numel:
            return [self] if self.numel else []
        boxes = []
        core = self
        for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            boxes += [core._narrow(dim, core.offsets[dim], start), core._narrow(dim, end, core.ends[dim])]
            core = core._narrow(dim, start, end)
        return [box for box in boxes if box.numel]

    def _narrow(self, dim: int, start: int, end: int) -> Box:
        """Return this box with dimension `dim` narrowed to the coordinates [start, end)."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim], sizes[dim] = start, end - start
        return Box(tuple(offsets), tuple(sizes))

    def to_slices(self, outer: Box) -> tuple[slice, ...]:
        """Return slices that select this box from the local tensor that holds `outer`, in which the box must lie."""
        starts = [start - base for start, base in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def __str__(self) -> str:
        """Return "[start:end,...]", which is also part of the tensor keys in checkpoint shards."""
        spans = (f"{offset}:{end}" for offset, end in zip(self.offsets, self.ends, strict=True))
        return f"[{','.join(spans)}]"


@dataclass(frozen=True, slots=True)
class TensorSlices:
    """The boxes held of one tensor. `shape` is the global shape, `dtype` a key of ITEM_BYTES.

    Raises ValueError for an unknown dtype and for a box outside the shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r} is not supported; use one of {', '.join(ITEM_BYTES)}")
        for box in self.boxes:
            if not box.is_inside(self.shape):
                raise ValueError(f"{self.name}: box {box} is outside shape {self.shape}")


class StateIndex(Mapping[str, TensorSlices]):
    """An immutable mapping from tensor name to the slices held of that tensor, in the order given.

    Equality ignores the order of names. Raises ValueError if a name occurs twice.
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
        """Return the index of these names only; names that are not in this index are skipped."""
        return StateIndex(self[name] for name in names if name in self)

    def to_json(self) -> dict[str, Any]:
        """Convert to dicts, lists, strings and numbers: {name: {shape, dtype, boxes: [[offsets, sizes], ...]}}."""
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
        """Build an index from the output of `to_json`. Raises ValueError, KeyError or TypeError if malformed."""
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
    """One region to copy from a source state to a destination state.

    `source_box_number` and `destination_box_number` are positions in `boxes` of the entry for `name` in the source and
    destination index. The slices select the region in the local tensors of these boxes.
    """

    name: str
    source_box_number: int
    destination_box_number: int
    region: Box
    source_slices: tuple[slice, ...]
    destination_slices: tuple[slice, ...]


def merge_indexes(indexes: Iterable[StateIndex]) -> StateIndex:
    """Return the union of these indexes: each distinct box once, without empty boxes.

    Raises ValueError naming the first tensor whose shape or dtype differs between two indexes.
    """
    first: dict[str, TensorSlices] = {}
    boxes: dict[str, dict[Box, None]] = {}
    for index in indexes:
        for tensor in index.values():
            known = first.setdefault(tensor.name, tensor)
            if difference := _find_tensor_difference(known, tensor):
                raise ValueError(difference)
            non_empty = (box for box in tensor.boxes if box.numel)
            boxes.setdefault(tensor.name, {}).update(dict.fromkeys(non_empty))
    return StateIndex(TensorSlices(name, t.shape, t.dtype, tuple(boxes[name])) for name, t in first.items())


def plan_copies(source: StateIndex, destination: StateIndex) -> list[RegionCopy]:
    """Plan the copies that fill `destination` from one `source`, each element of a destination box at most once.

    Of overlapping source boxes (replicas) the first one is used. Regions and names that the source does not hold are
    skipped; use `find_missing` to detect them. Shapes and dtypes are not compared; call `find_difference` first.
    """
    copies = []
    for tensor in destination.values():
        source_boxes = source[tensor.name].boxes if tensor.name in source else ()
        for destination_number, box in enumerate(tensor.boxes):
            covered, _ = _cover(box, source_boxes)
            copies += [
                RegionCopy(
                    tensor.name,
                    source_number,
                    destination_number,
                    region,
                    region.to_slices(source_boxes[source_number]),
                    region.to_slices(box),
                )
                for source_number, region in covered
            ]
    return copies


def plan_copies_from_ranks(
    sources: Sequence[StateIndex], destination: StateIndex, first_source: int = 0
) -> tuple[list[tuple[int, RegionCopy]], list[tuple[str, Box]]]:
    """Plan the copies that fill `destination` from the states of several ranks.

    `sources` are indexes by rank. Source `first_source` is used as far as it reaches, then the next one, wrapping
    around. With the destination's rank as `first_source`, a rank uses its own state first; each other region comes from
    the next higher rank that holds it, wrapping around, so several ranks may read from one. Shapes and dtypes are not
    compared. Returns (source rank, copy) pairs, and the regions that no source holds.
    """
    order = [(first_source + turn) % len(sources) for turn in range(len(sources))]
    copies, missing_regions = [], []
    for tensor in destination.values():
        candidates = [
            (source_rank, number, box)
            for source_rank in order
            if tensor.name in sources[source_rank]
            for number, box in enumerate(sources[source_rank][tensor.name].boxes)
        ]
        for destination_number, box in enumerate(tensor.boxes):
            covered, uncovered = _cover(box, [candidate_box for _, _, candidate_box in candidates])
            missing_regions += [(tensor.name, region) for region in uncovered]
            for number, region in covered:
                source_rank, source_number, source_box = candidates[number]
                slices = region.to_slices(source_box), region.to_slices(box)
                copies.append(
                    (source_rank, RegionCopy(tensor.name, source_number, destination_number, region, *slices))
                )
    return copies, missing_regions


def find_missing(sources: Iterable[StateIndex], destination: StateIndex) -> list[tuple[str, Box]]:
    """Return the regions of `destination`, in global coordinates, that no source covers; empty if complete.

    Shapes and dtypes of `destination` are not compared. Raises ValueError if two sources disagree on a tensor's shape
    or dtype.
    """
    source = merge_indexes(sources)
    regions = []
    for tensor in destination.values():
        source_boxes = source[tensor.name].boxes if tensor.name in source else ()
        for box in tensor.boxes:
            regions += [(tensor.name, region) for region in _cover(box, source_boxes)[1]]
    return regions


def find_difference(a: StateIndex, b: StateIndex) -> str | None:
    """Describe the first difference in names, global shapes or dtypes, for an error message; None if there is none.

    The text describes `a`: a name only in `b` "is missing", a name only in `a` "is unknown". Boxes are not compared, so
    two layouts of one state are equal. To check only the names in `b`, pass `a.select(b)`. Tensors without elements
    may be absent: empty boxes are not written to a checkpoint.
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
    indexes: Sequence[StateIndex], position: int, names: Iterable[str]
) -> dict[str, list[tuple[int, Box]]]:
    """Return the regions of these tensors that index `position` owns: it holds them and no earlier index does.

    Used to count each element once in the gradient norm, with the indexes of the ranks of one state replica. The result
    maps each name to (box number, region) pairs in global coordinates. Over all indexes, the regions cover each held
    element exactly once. Of overlapping boxes of one index, the earlier one owns the overlap.
    """
    regions: dict[str, list[tuple[int, Box]]] = {}
    for name in names:
        taken = [box for lower in indexes[:position] if name in lower for box in lower[name].boxes]
        owned = regions.setdefault(name, [])
        for number, box in enumerate(indexes[position][name].boxes if name in indexes[position] else ()):
            owned += [(number, region) for region in _cover(box, taken)[1]]
            taken.append(box)
    return regions


def assign_writers(indexes: Sequence[StateIndex]) -> list[list[tuple[str, int]]]:
    """Assign each distinct box to one rank that holds it. Return, per rank, the (name, box number) pairs to write.

    Call once per generation, with the index of every rank; the assignment holds for all its checkpoints. Different
    boxes that overlap are each written. The largest box is assigned first, each to its holder with
    the fewest bytes so far; ties go to the lower rank. The result is the same on every rank and does not depend on the
    order of names. Empty boxes are not written.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for rank, index in enumerate(indexes):
        for tensor in index.values():
            for number, box in enumerate(tensor.boxes):
                box_holders = holders.setdefault((tensor.name, box), [])
                if box.numel and (not box_holders or box_holders[-1][0] != rank):
                    box_holders.append((rank, number))
    nbytes = {
        (name, box): box.numel * ITEM_BYTES[indexes[box_holders[0][0]][name].dtype]
        for (name, box), box_holders in holders.items()
        if box_holders
    }
    load = [0] * len(indexes)
    writes: list[list[tuple[str, int]]] = [[] for _ in indexes]
    for key in sorted(nbytes, key=lambda key: (-nbytes[key], key)):
        rank, number = min(holders[key], key=lambda holder: (load[holder[0]], holder[0]))
        load[rank] += nbytes[key]
        writes[rank].append((key[0], number))
    return writes


def _cover(box: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box]], list[Box]]:
    """Cover `box` with `sources`, in order. Return (source number, region) pairs and the regions left uncovered."""
    covered: list[tuple[int, Box]] = []
    remaining = [box] if box.numel else []
    for number, source in enumerate(sources):
        if not remaining:
            break
        if not covered and source == box:  # fast path: the common case, and there may be many sources
            return [(number, box)], []
        if not box.intersection(source).numel:
            continue
        uncovered = []
        for region in remaining:
            common = region.intersection(source)
            if common.numel:
                covered.append((number, common))
            uncovered += region.difference(source)
        remaining = uncovered
    return covered, remaining


def _find_tensor_difference(a: TensorSlices, b: TensorSlices) -> str | None:
    """Describe how shape or dtype of `a` differ from those of `b`; None if they are equal."""
    if a.shape != b.shape:
        return f"{a.name} has shape {list(a.shape)}, not {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.name} has dtype {a.dtype}, not {b.dtype}"
    return None
