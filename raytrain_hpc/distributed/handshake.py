"""What the ranks of a generation tell each other when it begins, all at once: each exchange costs milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from raytrain_hpc.distributed.abort import Connection, find_peer_sockets, list_connections
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.snapshot.shared_memory import SharedMemoryHandle
from raytrain_hpc.state.reshard import parse_indexes
from raytrain_hpc.state.shard_index import StateIndex


@dataclass(frozen=True)
class PeerInfo:
    """By rank: what each is to hold, what each has to offer of it, and where others find the snapshots that it shares.
    `sockets`: this rank's to the others, by their descriptors."""

    destination_indexes: list[StateIndex]
    source_indexes: list[StateIndex]
    handles: list[Sequence[SharedMemoryHandle]]
    peer_sockets: Mapping[int, str]


def exchange_peer_info(
    destination: StateIndex, source: StateIndex, context: ParallelContext, handles: Sequence[SharedMemoryHandle] = ()
) -> PeerInfo:
    """Collective, when all groups have been made."""
    if context.world_group is None:
        return PeerInfo([destination], [source], [handles], {})
    mine: list[Connection] = [] if context.device.type == "cuda" else list_connections()
    words = (
        json.dumps(destination.to_json()),
        json.dumps(source.to_json()),
        handles,
        [one.local_endpoint for one in mine],
    )
    heard = [words] * context.layout.world_size
    dist.all_gather_object(heard, words)
    holdings, offers, openings, ends = zip(*heard, strict=True)
    sockets = find_peer_sockets(mine, ends, context.rank)
    return PeerInfo(parse_indexes(list(holdings)), parse_indexes(list(offers)), list(openings), sockets)
