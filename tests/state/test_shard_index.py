"""State index functions compared with boolean numpy masks, one cell per element, without arithmetic on boxes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raytrain_hpc.state.shard_index import (
    Box,
    StateIndex,
    TensorSlices,
    assign_writers,
    find_difference,
    find_missing,
    merge_indexes,
    plan_copies,
)


def random_shape(rng, ndim):
    return tuple(int(size) for size in rng.integers(1, 7, ndim))


def random_box(rng, shape):
    ends = [sorted(int(end) for end in rng.integers(0, size + 1, 2)) for size in shape]
    return Box(tuple(start for start, _ in ends), tuple(stop - start for start, stop in ends))


def make_mask(shape, *boxes):
    """Return a mask that is True inside any of the boxes."""
    mask = np.zeros(shape, dtype=bool)
    for box in boxes:
        mask[box.to_slices(Box.from_shape(shape))] = True
    return mask


def make_index(shape, boxes, name="w", dtype="float32"):
    """Return an index of one tensor."""
    return StateIndex([TensorSlices(name, shape, dtype, tuple(boxes))])


def split_rows(size, ranks):
    """Split rows unevenly: the first ranks get ceil(size / ranks) rows, the last ones fewer or none."""
    step = -(-size // ranks)
    starts = [min(size, step * rank) for rank in range(ranks + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_box_operations_agree_with_masks(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, seed % 4)
    a, b = random_box(rng, shape), random_box(rng, shape)
    assert a.numel == make_mask(shape, a).sum()
    common = a.intersection(b)
    assert common.numel == (make_mask(shape, a) & make_mask(shape, b)).sum()
    difference = a.difference(b)
    assert (make_mask(shape, *difference) == (make_mask(shape, a) & ~make_mask(shape, b))).all()
    assert sum(box.numel for box in difference) == make_mask(shape, *difference).sum(), "the boxes must be disjoint"
    assert all(box.numel for box in difference)


@pytest.mark.parametrize("seed", range(60))
def test_planned_copies_agree_with_slices_of_the_global_array(seed):
    """Random overlapping source boxes with gaps and random destination boxes, 0-d to 3-d, some of them empty."""
    rng = np.random.default_rng(1000 + seed)
    shape = random_shape(rng, seed % 4)
    array = rng.integers(1, 10**6, shape)
    sources = [random_box(rng, shape) for _ in range(rng.integers(0, 6))]
    targets = [random_box(rng, shape) for _ in range(rng.integers(1, 4))]
    outer = Box.from_shape(shape)
    stored = [array[box.to_slices(outer)] for box in sources]
    filled = [np.zeros(box.sizes, dtype=array.dtype) for box in targets]
    counts = [np.zeros(box.sizes, dtype=int) for box in targets]
    for copy in plan_copies(make_index(shape, sources), make_index(shape, targets)):
        filled[copy.destination_box_number][copy.destination_slices] = stored[copy.source_box_number][
            copy.source_slices
        ]
        counts[copy.destination_box_number][copy.destination_slices] += 1
        assert (stored[copy.source_box_number][copy.source_slices] == array[copy.region.to_slices(outer)]).all()
    covered = make_mask(shape, *sources)
    for box, actual, count in zip(targets, filled, counts, strict=True):
        reachable = covered[box.to_slices(outer)]
        assert (count == reachable).all(), "each covered element exactly once, the others never"
        assert (actual == np.where(reachable, array[box.to_slices(outer)], 0)).all()
    gaps = find_missing([make_index(shape, [box]) for box in sources], make_index(shape, targets))
    expected = make_mask(shape, *targets) & ~covered
    assert (make_mask(shape, *[region for _, region in gaps]) == expected).all()


def test_uneven_row_shards_of_every_degree_fill_every_other_degree():
    shape = (7, 3)
    for source_degree in range(1, 10):
        sources = [Box((a, 0), (b - a, 3)) for a, b in split_rows(7, source_degree)]
        for target_degree in range(1, 10):
            for a, b in split_rows(7, target_degree):
                target = make_index(shape, [Box((a, 0), (b - a, 3))])
                copies = plan_copies(make_index(shape, sources), target)
                assert sum(copy.region.numel for copy in copies) == (b - a) * 3
                assert find_missing([make_index(shape, sources)], target) == []


def test_a_scalar_has_one_element_and_an_empty_tensor_none():
    scalar = make_index((), [Box((), ())])
    (copy,) = plan_copies(scalar, scalar)
    assert copy.region.numel == 1 and copy.source_slices == ()
    assert find_missing([], scalar) == [("w", Box((), ()))]
    assert find_missing([], make_index((0, 4), [Box.from_shape((0, 4))])) == []


def test_a_tensor_in_no_source_is_missing_completely():
    target = make_index((2, 2), [Box.from_shape((2, 2))])
    source = make_index((2, 2), [Box.from_shape((2, 2))], name="other")
    assert find_missing([source], target) == [("w", Box.from_shape((2, 2)))]


def test_invalid_boxes_dtypes_and_names_are_refused():
    with pytest.raises(ValueError, match="negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="1 offsets and 2 sizes"):
        Box((0,), (1, 1))
    with pytest.raises(ValueError, match=r"w: box \[2:5\] is outside shape \(4,\)"):
        make_index((4,), [Box((2,), (3,))])
    with pytest.raises(ValueError, match="float7"):
        make_index((4,), [], dtype="float7")
    with pytest.raises(ValueError, match="occurs twice"):
        StateIndex([*make_index((4,), []).values(), *make_index((4,), []).values()])


def test_an_index_survives_a_json_round_trip():
    weight = make_index((5, 2), [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))])
    before = merge_indexes([weight, make_index((), [Box((), ())], name="step")])
    after = StateIndex.from_json(json.loads(json.dumps(before.to_json())))
    assert dict(after) == dict(before)


def test_find_difference_names_the_first_difference():
    a = make_index((4, 2), [])
    assert find_difference(a, make_index((4, 2), [Box((0, 0), (1, 1))])) is None
    assert find_difference(a, make_index((4, 3), [])) == "w has shape [4, 2], not [4, 3]"
    assert find_difference(a, make_index((4, 2), [], dtype="bfloat16")) == "w has dtype float32, not bfloat16"
    assert find_difference(a, merge_indexes([a, make_index((1,), [], name="b")])) == "b is missing"
    assert find_difference(merge_indexes([a, make_index((1,), [], name="b")]), a) == "b is unknown"
    with_empty = merge_indexes([a, make_index((0, 3), [], name="empty")])
    assert find_difference(a, with_empty) is None and find_difference(with_empty, a) is None
    with pytest.raises(ValueError, match=r"w has shape \[4, 2\], not \[4, 3\]"):
        merge_indexes([a, make_index((4, 3), [])])


@pytest.mark.parametrize("seed", range(20))
def test_every_box_is_written_by_exactly_one_rank_that_holds_it(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    slices_by_rank = [[] for _ in range(ranks)]
    for number in range(12):
        shape = random_shape(rng, number % 3)
        for rank in range(ranks):
            if rng.random() < 0.7:
                box = Box.from_shape(shape) if number % 2 else random_box(rng, shape)
                slices_by_rank[rank].append(TensorSlices(f"t{number}", shape, "float32", (box,)))
    indexes = [StateIndex(slices) for slices in slices_by_rank]
    writes = assign_writers(indexes)
    written = [(name, indexes[rank][name].boxes[box]) for rank, assigned in enumerate(writes) for name, box in assigned]
    distinct = {(t.name, box) for index in indexes for t in index.values() for box in t.boxes if box.numel}
    assert len(written) == len(set(written)) and set(written) == distinct
    assert writes == assign_writers([StateIndex(reversed(slices)) for slices in slices_by_rank]), (
        "the result must not depend on the order of names"
    )


def test_writing_is_balanced_between_replicas():
    sizes = [50257 * 8, *[64 * k for k in range(1, 200)]]
    replica = StateIndex(TensorSlices(f"t{n}", (s,), "float32", (Box((0,), (s,)),)) for n, s in enumerate(sizes))
    writes = assign_writers([replica] * 4)
    load = [sum(replica[name].boxes[box].numel for name, box in assigned) for assigned in writes]
    assert max(load) - min(load) < 0.01 * max(load)
    assert sum(load) == sum(sizes)


def test_a_rank_with_a_large_shard_of_its_own_writes_nothing_else():
    big = TensorSlices("big", (100,), "float32", (Box((0,), (100,)),))
    small = [TensorSlices(f"s{n}", (10,), "float32", (Box((0,), (10,)),)) for n in range(10)]
    first, second = assign_writers([StateIndex([big, *small]), StateIndex(small)])
    assert first == [("big", 0)]
    assert len(second) == 10
