"""The exchange of information between the ranks of a generation at its start.

One all-gather carries everything, because each one costs milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from raytrain_hpc.distributed.abort import Connection, find_peer_sockets, list_connections
from raytrain_hpc.distributed.peer_links import PeerSocket
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.snapshot.shared_file import SnapshotHandles
from raytrain_hpc.state.reshard import parse_indexes
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.torch_device import is_accelerator


@dataclass(frozen=True)
class PeerInfo:
    """Information about all ranks of a generation. The lists are by rank.

    `destination_indexes`: the state that each rank needs. `source_indexes`: the state that it has in memory. `handles`:
    the shared memory of its snapshots, None: it takes none there. `peer_sockets`: this rank's own sockets to other
    ranks, by descriptor.
    """

    destination_indexes: list[StateIndex]
    source_indexes: list[StateIndex]
    handles: list[SnapshotHandles | None]
    peer_sockets: Mapping[int, PeerSocket]


def exchange_peer_info(
    destination: StateIndex, source: StateIndex, context: ParallelContext, handles: SnapshotHandles | None = None
) -> PeerInfo:
    """Exchange indexes, handles and socket addresses with all ranks. Collective.

    Call once per generation, after all process groups have been created: sockets of later groups are not seen.
    """
    if context.world_group is None:
        return PeerInfo([destination], [source], [handles], {})
    own_connections: list[Connection] = [] if is_accelerator(context.device) else list_connections()
    message = (
        json.dumps(destination.to_json()),
        json.dumps(source.to_json()),
        handles,
        [connection.local_endpoint for connection in own_connections],
    )
    messages = [message] * context.layout.world_size
    dist.all_gather_object(messages, message)
    destinations, sources, handle_lists, endpoints = zip(*messages, strict=True)
    peer_sockets = find_peer_sockets(own_connections, endpoints, context.rank)
    return PeerInfo(parse_indexes(list(destinations)), parse_indexes(list(sources)), list(handle_lists), peer_sockets)
