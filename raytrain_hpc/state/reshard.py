"""State that moves between ranks: whoever holds a region gives it to whoever needs it. No disk, no first rank.

Shrinking, growing, replacing a rank and changing the layout are all this: what a rank has of a step is offered, what it
needs is the holding of its new place, and both are known to everybody as plain data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from raytrain_hpc.errors import StateLostError
from raytrain_hpc.state.shard_index import ITEM_BYTES, RegionCopy, StateIndex, plan_copies_from_ranks
from raytrain_hpc.state.sharded_state import ShardedState

ROUND_BYTES = 256 << 20  # that all ranks together move in one exchange: bounds the copies that are made for it


@dataclass(frozen=True)
class _Transfer:
    source_rank: int
    destination_rank: int
    copy: RegionCopy
    nbytes: int


def reshard_state(
    destination: ShardedState,
    source: ShardedState,
    group: dist.ProcessGroup | None,
    device: torch.device,
    indexes: tuple[Sequence[StateIndex], Sequence[StateIndex]] | None = None,
) -> int:
    """Fill `holding` in place from what the ranks of the group offer; what a rank offers itself costs no transfer.

    Collective. `device` is where the group communicates. `known`: what all of them offer and hold, where they have told
    each other. Returns the bytes that this rank received from others. Raises StateLost, on every rank, where a region
    that any of them needs is offered by none.
    """
    rank = 0 if group is None else dist.get_rank(group)
    offers, wanted = indexes or (
        _gather_indexes(source.to_index(), group),
        _gather_indexes(destination.to_index(), group),
    )
    transfers = _plan_transfers(offers, wanted)
    received = 0
    for some in _split_into_rounds(transfers):
        for one in some:
            if one.source_rank == one.destination_rank == rank:
                target = destination.get_shard(one.copy.name, one.copy.destination_box).tensor[
                    one.copy.destination_slices
                ]
                target.copy_(source.get_shard(one.copy.name, one.copy.source_box).tensor[one.copy.source_slices])
        moving = [one for one in some if one.source_rank != one.destination_rank]
        if moving and group is not None:
            received += _exchange(moving, destination, source, rank, group, device)
    return received


def parse_indexes(texts: Sequence[str]) -> list[StateIndex]:
    """Indexes as JSON texts. Replicas hold the same: what is equal is read once."""
    read = {text: StateIndex.from_json(json.loads(text)) for text in set(texts)}
    return [read[text] for text in texts]


def _gather_indexes(index: StateIndex, group: dist.ProcessGroup | None) -> list[StateIndex]:
    if group is None:
        return [index]
    gathered = [""] * dist.get_world_size(group)
    dist.all_gather_object(gathered, json.dumps(index.to_json()), group=group)
    return parse_indexes(gathered)


def _plan_transfers(sources: Sequence[StateIndex], destinations: Sequence[StateIndex]) -> list[_Transfer]:
    """What goes where, in an order that is the same on every rank."""
    transfers = []
    for destination, index in enumerate(destinations):
        pieces, lost = plan_copies_from_ranks(sources, index, destination)
        if lost:
            name, box = lost[0]
            raise StateLostError(f"{name}{box}: no rank that is left holds it ({len(lost)} such regions)")
        for source, piece in pieces:
            size = piece.region.numel * ITEM_BYTES[index[piece.name].dtype]
            transfers.append(_Transfer(source, destination, piece, size))
    return sorted(transfers, key=lambda one: one.copy.name)


def _split_into_rounds(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    some: list[_Transfer] = []
    size = 0
    for one in transfers:
        moved = one.nbytes if one.source_rank != one.destination_rank else 0
        if some and size + moved > ROUND_BYTES:
            yield some
            some, size = [], 0
        some.append(one)
        size += moved
    if some:
        yield some


def _exchange(
    transfers: Sequence[_Transfer],
    destination: ShardedState,
    source: ShardedState,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """One exchange of bytes. What two ranks send each other lies in the order of the transfers on both sides."""
    world = dist.get_world_size(group)
    outgoing: list[list[_Transfer]] = [[] for _ in range(world)]
    incoming: list[list[_Transfer]] = [[] for _ in range(world)]
    for one in transfers:
        if one.source_rank == rank:
            outgoing[one.destination_rank].append(one)
        if one.destination_rank == rank:
            incoming[one.source_rank].append(one)
    sent = [
        source.get_shard(one.copy.name, one.copy.source_box).tensor[one.copy.source_slices]
        for some in outgoing
        for one in some
    ]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    out = torch.cat([empty, *(part.to(device).contiguous().view(-1).view(torch.uint8) for part in sent)])
    sizes_in, sizes_out = ([sum(one.nbytes for one in some) for some in side] for side in (incoming, outgoing))
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, out, sizes_in, sizes_out, group=group)
    begin = 0
    for one in (one for some in incoming for one in some):
        target = destination.get_shard(one.copy.name, one.copy.destination_box).tensor[one.copy.destination_slices]
        # A copy puts the bytes where every dtype may begin.
        part = received[begin : begin + one.nbytes].clone().view(target.dtype).view(target.shape)
        target.copy_(part)
        begin += one.nbytes
    return int(received.numel())
