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

from raytrain_hpc.errors import StateLost
from raytrain_hpc.state.shard_index import ITEM_BYTES, Piece, StateIndex, route
from raytrain_hpc.state.sharded_state import Holding

ROUND_BYTES = 256 << 20  # that all ranks together move in one exchange: bounds the copies that are made for it


@dataclass(frozen=True)
class _Transfer:
    source: int
    destination: int
    piece: Piece
    bytes: int


def fill(
    holding: Holding,
    offered: Holding,
    group: dist.ProcessGroup | None,
    device: torch.device,
    known: tuple[Sequence[StateIndex], Sequence[StateIndex]] | None = None,
) -> int:
    """Fill `holding` in place from what the ranks of the group offer; what a rank offers itself costs no transfer.

    Collective. `device` is where the group communicates. `known`: what all of them offer and hold, where they have told
    each other. Returns the bytes that this rank received from others. Raises StateLost, on every rank, where a region
    that any of them needs is offered by none.
    """
    rank = 0 if group is None else dist.get_rank(group)
    offers, wanted = known or (_gather(offered.index(), group), _gather(holding.index(), group))
    transfers = _transfers(offers, wanted)
    received = 0
    for some in _rounds(transfers):
        for one in some:
            if one.source == one.destination == rank:
                target = holding.at(one.piece.name, one.piece.destination).tensor[one.piece.destination_slices]
                target.copy_(offered.at(one.piece.name, one.piece.source).tensor[one.piece.source_slices])
        moving = [one for one in some if one.source != one.destination]
        if moving and group is not None:
            received += _move(moving, holding, offered, rank, group, device)
    return received


def read_indexes(texts: Sequence[str]) -> list[StateIndex]:
    """Indexes as JSON texts. Replicas hold the same: what is equal is read once."""
    read = {text: StateIndex.from_json(json.loads(text)) for text in set(texts)}
    return [read[text] for text in texts]


def _gather(mine: StateIndex, group: dist.ProcessGroup | None) -> list[StateIndex]:
    if group is None:
        return [mine]
    gathered = [""] * dist.get_world_size(group)
    dist.all_gather_object(gathered, json.dumps(mine.to_json()), group=group)
    return read_indexes(gathered)


def _transfers(offers: Sequence[StateIndex], wanted: Sequence[StateIndex]) -> list[_Transfer]:
    """What goes where, in an order that is the same on every rank."""
    transfers = []
    for destination, index in enumerate(wanted):
        pieces, lost = route(offers, index, destination)
        if lost:
            name, box = lost[0]
            raise StateLost(f"{name}{box}: no rank that is left holds it ({len(lost)} such regions)")
        for source, piece in pieces:
            size = piece.region.numel * ITEM_BYTES[index[piece.name].dtype]
            transfers.append(_Transfer(source, destination, piece, size))
    return sorted(transfers, key=lambda one: one.piece.name)


def _rounds(transfers: Sequence[_Transfer]) -> Iterator[list[_Transfer]]:
    some: list[_Transfer] = []
    size = 0
    for one in transfers:
        moved = one.bytes if one.source != one.destination else 0
        if some and size + moved > ROUND_BYTES:
            yield some
            some, size = [], 0
        some.append(one)
        size += moved
    if some:
        yield some


def _move(
    moving: Sequence[_Transfer],
    holding: Holding,
    offered: Holding,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """One exchange of bytes. What two ranks send each other lies in the order of the transfers on both sides."""
    world = dist.get_world_size(group)
    outgoing: list[list[_Transfer]] = [[] for _ in range(world)]
    incoming: list[list[_Transfer]] = [[] for _ in range(world)]
    for one in moving:
        if one.source == rank:
            outgoing[one.destination].append(one)
        if one.destination == rank:
            incoming[one.source].append(one)
    sent = [
        offered.at(one.piece.name, one.piece.source).tensor[one.piece.source_slices]
        for some in outgoing
        for one in some
    ]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    out = torch.cat([empty, *(part.to(device).contiguous().view(-1).view(torch.uint8) for part in sent)])
    sizes_in, sizes_out = ([sum(one.bytes for one in some) for some in side] for side in (incoming, outgoing))
    received = torch.empty(sum(sizes_in), dtype=torch.uint8, device=device)
    dist.all_to_all_single(received, out, sizes_in, sizes_out, group=group)
    begin = 0
    for one in (one for some in incoming for one in some):
        target = holding.at(one.piece.name, one.piece.destination).tensor[one.piece.destination_slices]
        # A copy puts the bytes where every dtype may begin.
        part = received[begin : begin + one.bytes].clone().view(target.dtype).view(target.shape)
        target.copy_(part)
        begin += one.bytes
    return int(received.numel())
