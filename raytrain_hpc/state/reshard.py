"""Resharding between ranks: each rank gets the regions it needs from the ranks that hold them, without a file.

Shrinking, growing, replacing a rank and changing the layout are all one operation. Each rank contributes the state of
one step that it holds in memory (the source) and needs the state of its new layout (the destination). All ranks know
all indexes as plain data, so all of them plan the same transfers.
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

ROUND_BYTES = 256 << 20  # bytes that all ranks together move per exchange; bounds the temporary buffers


@dataclass(frozen=True)
class Transfer:
    """One region that moves from a rank to another or stays on its rank."""

    source_rank: int
    destination_rank: int
    region_copy: RegionCopy
    nbytes: int

    def select_from(self, source: ShardedState) -> torch.Tensor:
        """Return the region in the state of the source rank, as a view."""
        copy = self.region_copy
        return source.get_shard(copy.name, copy.source_box_number).tensor[copy.source_slices]

    def select_in(self, destination: ShardedState) -> torch.Tensor:
        """Return the region in the state of the destination rank, as a view."""
        copy = self.region_copy
        return destination.get_shard(copy.name, copy.destination_box_number).tensor[copy.destination_slices]


def reshard_state(
    destination: ShardedState,
    source: ShardedState,
    group: dist.ProcessGroup | None,
    device: torch.device,
    indexes: tuple[Sequence[StateIndex], Sequence[StateIndex]] | None = None,
) -> int:
    """Fill `destination` in place from the `source` states of all ranks in `group`, of any layout.

    Collective. Call at the start of a generation (a set of workers with fixed ranks) if state is restored from memory.
    Regions that a rank holds itself are copied without communication. Shapes and dtypes of a name must be equal in all
    states; this is not checked. `source` may include replicas of other ranks' snapshots, and must not share memory with
    `destination`.

    `group`: None if this rank is alone. `device`: the device on which the group communicates. `indexes`: the source
    and destination indexes of all ranks, by rank; gathered if omitted. Returns the bytes received from other ranks.
    Raises StateLostError on every rank if any rank needs a region that no rank holds.
    """
    rank = 0 if group is None else dist.get_rank(group)
    sources, destinations = indexes or (
        _gather_indexes(source.to_index(), group),
        _gather_indexes(destination.to_index(), group),
    )
    transfers = _plan_transfers(sources, destinations)
    received_bytes = 0
    for round_transfers in _split_into_rounds(transfers):
        for transfer in round_transfers:
            if transfer.source_rank == transfer.destination_rank == rank:
                transfer.select_in(destination).copy_(transfer.select_from(source))
        remote = [transfer for transfer in round_transfers if transfer.source_rank != transfer.destination_rank]
        if remote and group is not None:
            received_bytes += exchange_regions(remote, destination, source, rank, group, device)
    return received_bytes


def parse_indexes(texts: Sequence[str]) -> list[StateIndex]:
    """Parse indexes from JSON texts. Equal texts, as replicas send them, are parsed once."""
    parsed = {text: StateIndex.from_json(json.loads(text)) for text in set(texts)}
    return [parsed[text] for text in texts]


def _gather_indexes(index: StateIndex, group: dist.ProcessGroup | None) -> list[StateIndex]:
    """Return the indexes of all ranks of the group, by rank. Collective."""
    if group is None:
        return [index]
    gathered = [""] * dist.get_world_size(group)
    dist.all_gather_object(gathered, json.dumps(index.to_json()), group=group)
    return parse_indexes(gathered)


def _plan_transfers(sources: Sequence[StateIndex], destinations: Sequence[StateIndex]) -> list[Transfer]:
    """Plan the transfers that fill all destinations, in an order that is the same on every rank.

    Raises StateLostError if a region of a destination is in no source.
    """
    transfers = []
    for destination_rank, index in enumerate(destinations):
        copies, missing_regions = plan_copies_from_ranks(sources, index, destination_rank)
        if missing_regions:
            name, box = missing_regions[0]
            raise StateLostError(
                f"{name}{box} of rank {destination_rank}: no surviving rank holds this region; "
                f"{len(missing_regions)} such regions of this rank"
            )
        for source_rank, copy in copies:
            nbytes = copy.region.numel * ITEM_BYTES[index[copy.name].dtype]
            transfers.append(Transfer(source_rank, destination_rank, copy, nbytes))
    return sorted(transfers, key=lambda transfer: transfer.region_copy.name)


def _split_into_rounds(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Split transfers into rounds that move at most ROUND_BYTES between ranks; a larger one gets its own round."""
    round_transfers: list[Transfer] = []
    round_bytes = 0
    for transfer in transfers:
        moved_bytes = transfer.nbytes if transfer.source_rank != transfer.destination_rank else 0
        if round_transfers and round_bytes + moved_bytes > ROUND_BYTES:
            yield round_transfers
            round_transfers, round_bytes = [], 0
        round_transfers.append(transfer)
        round_bytes += moved_bytes
    if round_transfers:
        yield round_transfers


def exchange_regions(
    transfers: Sequence[Transfer],
    destination: ShardedState,
    source: ShardedState,
    rank: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> int:
    """Exchange regions between ranks by one all-to-all. Collective. Return the bytes received.

    `transfers`: at least those that this rank sends or receives. Sender and receiver order the regions between them as
    in `transfers`, so no headers are sent.
    """
    world_size = dist.get_world_size(group)
    outgoing: list[list[Transfer]] = [[] for _ in range(world_size)]
    incoming: list[list[Transfer]] = [[] for _ in range(world_size)]
    for transfer in transfers:
        if transfer.source_rank == rank:
            outgoing[transfer.destination_rank].append(transfer)
        if transfer.destination_rank == rank:
            incoming[transfer.source_rank].append(transfer)
    sent = [transfer.select_from(source) for peer_transfers in outgoing for transfer in peer_transfers]
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    send_buffer = torch.cat([empty, *(region.to(device).contiguous().view(-1).view(torch.uint8) for region in sent)])
    receive_sizes, send_sizes = (
        [sum(transfer.nbytes for transfer in peer_transfers) for peer_transfers in direction]
        for direction in (incoming, outgoing)
    )
    receive_buffer = torch.empty(sum(receive_sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(receive_buffer, send_buffer, receive_sizes, send_sizes, group=group)
    start = 0
    for transfer in (transfer for peer_transfers in incoming for transfer in peer_transfers):
        target = transfer.select_in(destination)
        # The clone aligns the bytes for every dtype.
        region = receive_buffer[start : start + transfer.nbytes].clone().view(target.dtype).view(target.shape)
        target.copy_(region)
        start += transfer.nbytes
    return int(receive_buffer.numel())
