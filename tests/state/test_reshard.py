"""State that moves between ranks: from any cut to any other, and never a part of it silently."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import destroy_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.errors import StateLostError
from raytrain_hpc.state import reshard
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.shard_index import Box, StateIndex, TensorSlices, plan_copies_from_ranks
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, dtype_name

RANKS = 4
SHAPES = {"a": (7, 5), "b": (13,), "c": (), "d": (4, 6, 3), "e": (0, 3), "f": (40,)}
DTYPES = {
    "a": torch.float32,
    "b": torch.bfloat16,
    "c": torch.int64,
    "d": torch.float64,
    "e": torch.uint8,
    "f": torch.bool,
}


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(0, 120, SHAPES[name], generator=generator).to(DTYPES[name])


def held(name: str, box: Box, *, empty: bool = False) -> StateShard:
    part = whole(name)[box.to_slices(Box.from_shape(SHAPES[name]))]
    return StateShard(
        name, SHAPES[name], dtype_name(part.dtype), box, torch.zeros_like(part) if empty else part.clone()
    )


def cut(name: str, pieces: int, dim: int) -> list[Box]:
    """A tensor in rows or columns, unevenly; the last pieces of a small one are empty."""
    shape = SHAPES[name]
    if not shape:
        return [Box.from_shape(shape)] * pieces
    dim %= len(shape)
    ends = [round(shape[dim] * (i / pieces) ** 1.3) for i in range(pieces + 1)]
    boxes = []
    for start, end in zip(ends, ends[1:], strict=False):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, end - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def by_rank(ranks: list[int], dim: int) -> list[dict[str, list[Box]]]:
    """One piece of every tensor a rank of `ranks`; nothing on the others."""
    there: list[dict[str, list[Box]]] = [{name: [] for name in SHAPES} for _ in range(RANKS)]
    for name in SHAPES:
        for rank, box in zip(ranks, cut(name, len(ranks), dim), strict=True):
            there[rank][name].append(box)
    return there


EVERYTHING = [{name: [Box.from_shape(shape)] for name, shape in SHAPES.items()}] * RANKS
NOTHING = {name: [] for name in SHAPES}
CASES = {
    "the same again": (by_rank([0, 1, 2, 3], 0), by_rank([0, 1, 2, 3], 0)),
    "rows to columns": (by_rank([0, 1, 2, 3], 0), by_rank([0, 1, 2, 3], 1)),
    "two to four": (by_rank([0, 1], 0), by_rank([3, 2, 1, 0], 1)),
    "four to one": (by_rank([0, 1, 2, 3], 1), by_rank([2], 0)),
    "copies, and one who lost all": ([EVERYTHING[0], NOTHING, EVERYTHING[0], NOTHING], EVERYTHING),
    "shards to copies": (by_rank([3, 1, 0], 0), EVERYTHING),
}


def holding(boxes: dict[str, list[Box]], *, empty: bool = False) -> ShardedState:
    return ShardedState(held(name, box, empty=empty) for name, some in boxes.items() for box in some)


def joined(rank: int, meeting: Rendezvous) -> None:
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = PrefixStore(f"generation-{meeting.generation}", TCPStore(meeting.host, meeting.port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def moved(rank: int, meeting: Rendezvous, name: str, round_bytes: int) -> tuple[bool, int]:
    offers, wanted = CASES[name]
    joined(rank, meeting)
    reshard.ROUND_BYTES = round_bytes
    try:
        got = holding(wanted[rank], empty=True)
        received = reshard_state(got, holding(offers[rank]), dist.group.WORLD, torch.device("cpu"))
        right = all(torch.equal(mine.tensor, held(mine.name, mine.box).tensor) for mine in got)
        return right and got.to_index() == holding(wanted[rank]).to_index(), received
    finally:
        destroy_process_groups()


@pytest.mark.parametrize("round_bytes", [1 << 20, 64])
@pytest.mark.parametrize("name", CASES)
def test_every_rank_gets_what_it_needs(pool: Any, name: str, round_bytes: int) -> None:
    found = pool.call(moved, RANKS, name, round_bytes)
    assert all(right for right, _ in found)
    received = sum(size for _, size in found)
    if name == "the same again":
        assert received == 0, "what a rank has itself does not travel"
    if name == "copies, and one who lost all":
        size = sum(whole(name).nbytes for name in SHAPES)
        assert [got for _, got in found] == [0, size, 0, size], "from a neighbour, and from none twice"


def lost(rank: int, meeting: Rendezvous) -> list[str]:
    joined(rank, meeting)
    try:
        offers = by_rank([0, 1, 2, 3], 0)[rank] if rank != 2 else NOTHING
        reshard_state(holding(EVERYTHING[0], empty=True), holding(offers), dist.group.WORLD, torch.device("cpu"))
    except StateLostError as error:
        return [str(error)]
    finally:
        destroy_process_groups()
    return []


def test_what_nobody_holds_is_said_on_every_rank(pool: Any) -> None:
    found = [said for (said,) in pool.call(lost, RANKS)]
    assert len(set(found)) == 1 and "no rank that is left holds it" in found[0] and found[0].startswith("a[")


def test_one_rank_alone() -> None:
    got = holding(by_rank([0, 1], 1)[1], empty=True)
    assert reshard_state(got, holding(EVERYTHING[0]), None, torch.device("cpu")) == 0
    assert all(torch.equal(mine.tensor, held(mine.name, mine.box).tensor) for mine in got)
    with pytest.raises(StateLostError):
        reshard_state(got, ShardedState(), None, torch.device("cpu"))


def test_a_route_covers_every_element_once() -> None:
    chance = random.Random(3)
    for _ in range(200):
        offers = [
            StateIndex([TensorSlices("t", (9, 8), "float32", tuple(some_box(chance) for _ in range(3)))])
            for _ in range(3)
        ]
        wanted = StateIndex([TensorSlices("t", (9, 8), "float32", (some_box(chance), some_box(chance)))])
        found, left = plan_copies_from_ranks(offers, wanted, chance.randrange(3))
        for number, box in enumerate(wanted["t"].boxes):
            counted = torch.zeros(9, 8, dtype=torch.int64)
            for offer, piece in found:
                if piece.destination_box == number:
                    counted[piece.region.to_slices(Box.from_shape((9, 8)))] += 1
                    source = offers[offer]["t"].boxes[piece.source_box]
                    assert source.intersection(piece.region) == piece.region == box.intersection(piece.region)
            offered = torch.zeros(9, 8, dtype=torch.bool)
            for offer in offers:
                for one in offer["t"].boxes:
                    offered[one.to_slices(Box.from_shape((9, 8)))] = True
            mine = torch.zeros(9, 8, dtype=torch.bool)
            mine[box.to_slices(Box.from_shape((9, 8)))] = True
            assert torch.equal(counted, (mine & offered).long())
        missing = sum(region.numel for _, region in left)
        assert missing == sum(box.numel for box in wanted["t"].boxes) - sum(piece.region.numel for _, piece in found)


def some_box(chance: random.Random) -> Box:
    offsets = chance.randrange(9), chance.randrange(8)
    return Box(offsets, (chance.randrange(10 - offsets[0]), chance.randrange(9 - offsets[1])))
