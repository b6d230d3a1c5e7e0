"""Resharding state between ranks, from any layout to any other; a region that no rank holds is always an error."""

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
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, get_dtype_name

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


def make_tensor(name: str) -> torch.Tensor:
    """Return the whole tensor of this name, the same on every rank."""
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randint(0, 120, SHAPES[name], generator=generator).to(DTYPES[name])


def make_shard(name: str, box: Box, *, empty: bool = False) -> StateShard:
    """Return the shard of a tensor in `box`; with `empty` its content is zeros."""
    local = make_tensor(name)[box.to_slices(Box.from_shape(SHAPES[name]))]
    content = torch.zeros_like(local) if empty else local.clone()
    return StateShard(name, SHAPES[name], get_dtype_name(local.dtype), box, content)


def split(name: str, count: int, dim: int) -> list[Box]:
    """Split a tensor along `dim` into boxes of uneven sizes; the last boxes of a small tensor are empty."""
    shape = SHAPES[name]
    if not shape:
        return [Box.from_shape(shape)] * count
    dim %= len(shape)
    ends = [round(shape[dim] * (i / count) ** 1.3) for i in range(count + 1)]
    boxes = []
    for start, end in zip(ends, ends[1:], strict=False):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dim], sizes[dim] = start, end - start
        boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes


def shard_over(ranks: list[int], dim: int) -> list[dict[str, list[Box]]]:
    """Return, per rank, the boxes by tensor name: one box of every tensor on each of `ranks`, none on the others."""
    boxes_by_rank: list[dict[str, list[Box]]] = [{name: [] for name in SHAPES} for _ in range(RANKS)]
    for name in SHAPES:
        for rank, box in zip(ranks, split(name, len(ranks), dim), strict=True):
            boxes_by_rank[rank][name].append(box)
    return boxes_by_rank


REPLICATED = [{name: [Box.from_shape(shape)] for name, shape in SHAPES.items()}] * RANKS
NOTHING = {name: [] for name in SHAPES}
CASES = {
    "unchanged layout": (shard_over([0, 1, 2, 3], 0), shard_over([0, 1, 2, 3], 0)),
    "rows to columns": (shard_over([0, 1, 2, 3], 0), shard_over([0, 1, 2, 3], 1)),
    "two ranks to four": (shard_over([0, 1], 0), shard_over([3, 2, 1, 0], 1)),
    "four ranks to one": (shard_over([0, 1, 2, 3], 1), shard_over([2], 0)),
    "replicas to ranks without state": ([REPLICATED[0], NOTHING, REPLICATED[0], NOTHING], REPLICATED),
    "shards to replicas": (shard_over([3, 1, 0], 0), REPLICATED),
}


def make_state(boxes: dict[str, list[Box]], *, empty: bool = False) -> ShardedState:
    """Return the state with these boxes; with `empty` its content is zeros."""
    return ShardedState(
        make_shard(name, box, empty=empty) for name, tensor_boxes in boxes.items() for box in tensor_boxes
    )


def init_default_group(rank: int, rendezvous: Rendezvous) -> None:
    """Create the default process group of all ranks on gloo."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    store = PrefixStore(
        f"generation-{rendezvous.generation}", TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)


def reshard_case(rank: int, rendezvous: Rendezvous, case: str, round_bytes: int) -> tuple[bool, int]:
    """Run one case on this rank. Return whether the result is right, and the bytes received."""
    sources, destinations = CASES[case]
    init_default_group(rank, rendezvous)
    reshard.ROUND_BYTES = round_bytes
    try:
        state = make_state(destinations[rank], empty=True)
        received = reshard_state(state, make_state(sources[rank]), dist.group.WORLD, torch.device("cpu"))
        is_equal = all(torch.equal(shard.tensor, make_shard(shard.name, shard.box).tensor) for shard in state)
        return is_equal and state.to_index() == make_state(destinations[rank]).to_index(), received
    finally:
        destroy_process_groups()


@pytest.mark.parametrize("round_bytes", [1 << 20, 64])
@pytest.mark.parametrize("name", CASES)
def test_resharding_gives_every_rank_its_destination_state(pool: Any, name: str, round_bytes: int) -> None:
    results = pool.call(reshard_case, RANKS, name, round_bytes)
    assert all(is_right for is_right, _ in results)
    total_received = sum(received for _, received in results)
    if name == "unchanged layout":
        assert total_received == 0, "regions that a rank holds itself are not sent"
    if name == "replicas to ranks without state":
        size = sum(make_tensor(name).nbytes for name in SHAPES)
        assert [received for _, received in results] == [0, size, 0, size], "each region is received once"


def reshard_without_rank_2(rank: int, rendezvous: Rendezvous) -> list[str]:
    """Reshard with the state of rank 2 missing. Return the message of the error."""
    init_default_group(rank, rendezvous)
    try:
        source = shard_over([0, 1, 2, 3], 0)[rank] if rank != 2 else NOTHING
        reshard_state(make_state(REPLICATED[0], empty=True), make_state(source), dist.group.WORLD, torch.device("cpu"))
    except StateLostError as error:
        return [str(error)]
    finally:
        destroy_process_groups()
    return []


def test_a_region_that_no_rank_holds_is_an_error_on_every_rank(pool: Any) -> None:
    messages = [message for (message,) in pool.call(reshard_without_rank_2, RANKS)]
    assert len(set(messages)) == 1 and "no surviving rank holds" in messages[0] and messages[0].startswith("a[")


def test_resharding_on_a_single_rank() -> None:
    state = make_state(shard_over([0, 1], 1)[1], empty=True)
    assert reshard_state(state, make_state(REPLICATED[0]), None, torch.device("cpu")) == 0
    assert all(torch.equal(shard.tensor, make_shard(shard.name, shard.box).tensor) for shard in state)
    with pytest.raises(StateLostError):
        reshard_state(state, ShardedState(), None, torch.device("cpu"))


def test_planned_copies_cover_every_offered_element_once() -> None:
    rng = random.Random(3)
    for _ in range(200):
        sources = [
            StateIndex([TensorSlices("t", (9, 8), "float32", tuple(random_box(rng) for _ in range(3)))])
            for _ in range(3)
        ]
        destination = StateIndex([TensorSlices("t", (9, 8), "float32", (random_box(rng), random_box(rng)))])
        copies, missing_regions = plan_copies_from_ranks(sources, destination, rng.randrange(3))
        for number, box in enumerate(destination["t"].boxes):
            counts = torch.zeros(9, 8, dtype=torch.int64)
            for source_rank, copy in copies:
                if copy.destination_box_number == number:
                    counts[copy.region.to_slices(Box.from_shape((9, 8)))] += 1
                    source_box = sources[source_rank]["t"].boxes[copy.source_box_number]
                    assert source_box.intersection(copy.region) == copy.region == box.intersection(copy.region)
            is_offered = torch.zeros(9, 8, dtype=torch.bool)
            for source in sources:
                for source_box in source["t"].boxes:
                    is_offered[source_box.to_slices(Box.from_shape((9, 8)))] = True
            is_wanted = torch.zeros(9, 8, dtype=torch.bool)
            is_wanted[box.to_slices(Box.from_shape((9, 8)))] = True
            assert torch.equal(counts, (is_wanted & is_offered).long())
        num_missing = sum(region.numel for _, region in missing_regions)
        num_wanted = sum(box.numel for box in destination["t"].boxes)
        assert num_missing == num_wanted - sum(copy.region.numel for _, copy in copies)


def random_box(rng: random.Random) -> Box:
    """Return a random box inside shape (9, 8), possibly empty."""
    offsets = rng.randrange(9), rng.randrange(8)
    return Box(offsets, (rng.randrange(10 - offsets[0]), rng.randrange(9 - offsets[1])))
