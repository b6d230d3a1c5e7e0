"""Every claim of the state index against boolean numpy arrays: one cell an element, no arithmetic on boxes."""

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


def cells(shape, *boxes):
    mask = np.zeros(shape, dtype=bool)
    for box in boxes:
        mask[box.slices_in(Box.from_shape(shape))] = True
    return mask


def index(shape, boxes, name="w", dtype="float32"):
    return StateIndex([TensorSlices(name, shape, dtype, tuple(boxes))])


def chunks(size, parts):
    """Uneven: the first ranks hold ceil(size / parts) rows, the last ones may hold fewer or none."""
    step = -(-size // parts)
    starts = [min(size, step * rank) for rank in range(parts + 1)]
    return list(zip(starts[:-1], starts[1:], strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_box_operations_agree_with_masks(seed):
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, seed % 4)
    a, b = random_box(rng, shape), random_box(rng, shape)
    assert a.numel == cells(shape, a).sum()
    common = a.intersection(b)
    assert common.numel == (cells(shape, a) & cells(shape, b)).sum()
    left = a.difference(b)
    assert (cells(shape, *left) == (cells(shape, a) & ~cells(shape, b))).all()
    assert sum(box.numel for box in left) == cells(shape, *left).sum(), "the rest must be disjoint boxes"
    assert all(box.numel for box in left)


@pytest.mark.parametrize("seed", range(60))
def test_pieces_move_what_a_global_array_would(seed):
    """Random overlapping sources with gaps, random destinations: 0-d to 3-d, empty boxes among them."""
    rng = np.random.default_rng(1000 + seed)
    shape = random_shape(rng, seed % 4)
    whole = rng.integers(1, 10**6, shape)
    sources = [random_box(rng, shape) for _ in range(rng.integers(0, 6))]
    targets = [random_box(rng, shape) for _ in range(rng.integers(1, 4))]
    outer = Box.from_shape(shape)
    stored = [whole[box.to_slices(outer)] for box in sources]
    filled = [np.zeros(box.sizes, dtype=whole.dtype) for box in targets]
    times = [np.zeros(box.sizes, dtype=int) for box in targets]
    for piece in plan_copies(index(shape, sources), index(shape, targets)):
        filled[piece.destination_box][piece.destination_slices] = stored[piece.source_box][piece.source_slices]
        times[piece.destination_box][piece.destination_slices] += 1
        assert (stored[piece.source_box][piece.source_slices] == whole[piece.region.to_slices(outer)]).all()
    covered = cells(shape, *sources)
    for box, got, count in zip(targets, filled, times, strict=True):
        reachable = covered[box.to_slices(outer)]
        assert (count == reachable).all(), "each covered element exactly once, the others never"
        assert (got == np.where(reachable, whole[box.to_slices(outer)], 0)).all()
    gaps = find_missing([index(shape, [box]) for box in sources], index(shape, targets))
    expected = cells(shape, *targets) & ~covered
    assert (cells(shape, *[region for _, region in gaps]) == expected).all()


def test_uneven_row_shards_of_every_degree_into_every_other():
    shape = (7, 3)
    for before in range(1, 10):
        source = [Box((a, 0), (b - a, 3)) for a, b in chunks(7, before)]
        for after in range(1, 10):
            for a, b in chunks(7, after):
                mine = index(shape, [Box((a, 0), (b - a, 3))])
                assert sum(p.region.numel for p in plan_copies(index(shape, source), mine)) == (b - a) * 3
                assert find_missing([index(shape, source)], mine) == []


def test_scalar_is_one_element_and_an_empty_tensor_none():
    scalar = index((), [Box((), ())])
    (piece,) = plan_copies(scalar, scalar)
    assert piece.region.numel == 1 and piece.source_slices == ()
    assert find_missing([], scalar) == [("w", Box((), ()))]
    assert find_missing([], index((0, 4), [Box.from_shape((0, 4))])) == []


def test_a_tensor_that_no_source_has_is_missing_whole():
    wanted = index((2, 2), [Box.from_shape((2, 2))])
    assert find_missing([index((2, 2), [Box.from_shape((2, 2))], name="other")], wanted) == [
        ("w", Box.from_shape((2, 2)))
    ]


def test_boxes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="negative"):
        Box((0,), (-1,))
    with pytest.raises(ValueError, match="1 offsets and 2 sizes"):
        Box((0,), (1, 1))
    with pytest.raises(ValueError, match=r"w: box \[2:5\] does not lie in shape \(4,\)"):
        index((4,), [Box((2,), (3,))])
    with pytest.raises(ValueError, match="float7"):
        index((4,), [], dtype="float7")
    with pytest.raises(ValueError, match="occurs twice"):
        StateIndex([*index((4,), []).values(), *index((4,), []).values()])


def test_index_survives_json():
    before = merge_indexes(
        [index((5, 2), [Box((0, 0), (3, 2)), Box((3, 0), (2, 2))]), index((), [Box((), ())], name="step")]
    )
    after = StateIndex.from_json(json.loads(json.dumps(before.to_json())))
    assert dict(after) == dict(before)


def test_compare_names_the_first_difference():
    a = index((4, 2), [])
    assert find_difference(a, index((4, 2), [Box((0, 0), (1, 1))])) is None
    assert find_difference(a, index((4, 3), [])) == "w has shape [4, 2], not [4, 3]"
    assert find_difference(a, index((4, 2), [], dtype="bfloat16")) == "w has dtype float32, not bfloat16"
    assert find_difference(a, merge_indexes([a, index((1,), [], name="b")])) == "b is missing"
    assert find_difference(merge_indexes([a, index((1,), [], name="b")]), a) == "b is unknown"
    nothing = merge_indexes([a, index((0, 3), [], name="nothing")])
    assert find_difference(a, nothing) is None and find_difference(nothing, a) is None
    with pytest.raises(ValueError, match=r"w has shape \[4, 2\], not \[4, 3\]"):
        merge_indexes([a, index((4, 3), [])])


@pytest.mark.parametrize("seed", range(20))
def test_every_box_has_one_writer_that_holds_it(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 6))
    held = [[] for _ in range(ranks)]
    for number in range(12):
        shape = random_shape(rng, number % 3)
        for rank in range(ranks):
            if rng.random() < 0.7:
                box = Box.from_shape(shape) if number % 2 else random_box(rng, shape)
                held[rank].append(TensorSlices(f"t{number}", shape, "float32", (box,)))
    indexes = [StateIndex(slices) for slices in held]
    writes = assign_writers(indexes)
    written = [(name, indexes[rank][name].boxes[box]) for rank, mine in enumerate(writes) for name, box in mine]
    distinct = {(t.name, box) for one in indexes for t in one.values() for box in t.boxes if box.numel}
    assert len(written) == len(set(written)) and set(written) == distinct
    assert writes == assign_writers([StateIndex(reversed(slices)) for slices in held]), (
        "the order of names is no matter"
    )


def test_replicas_share_the_writing():
    sizes = [50257 * 8, *[64 * k for k in range(1, 200)]]
    replica = StateIndex(TensorSlices(f"t{n}", (s,), "float32", (Box((0,), (s,)),)) for n, s in enumerate(sizes))
    writes = assign_writers([replica] * 4)
    load = [sum(replica[name].boxes[box].numel for name, box in mine) for mine in writes]
    assert max(load) - min(load) < 0.01 * max(load)
    assert sum(load) == sum(sizes)


def test_a_shard_that_one_rank_holds_is_written_there_and_the_rest_evens_out():
    big = TensorSlices("big", (100,), "float32", (Box((0,), (100,)),))
    small = [TensorSlices(f"s{n}", (10,), "float32", (Box((0,), (10,)),)) for n in range(10)]
    first, second = assign_writers([StateIndex([big, *small]), StateIndex(small)])
    assert first == [("big", 0)]
    assert len(second) == 10
