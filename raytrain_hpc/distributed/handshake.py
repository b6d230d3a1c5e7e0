"""What the ranks of a generation tell each other when it begins, all at once: each exchange costs milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from raytrain_hpc.distributed.abort import Connection, between_ranks, connections
from raytrain_hpc.distributed.process_groups import Place
from raytrain_hpc.snapshot.shared_memory import Opening
from raytrain_hpc.state.reshard import read_indexes
from raytrain_hpc.state.shard_index import StateIndex


@dataclass(frozen=True)
class Told:
    """By rank: what each is to hold, what each has to offer of it, and where others find the snapshots that it shares.
    `sockets`: this rank's to the others, by their descriptors."""

    holdings: list[StateIndex]
    offers: list[StateIndex]
    shared: list[Sequence[Opening]]
    sockets: Mapping[int, str]


def tell(holding: StateIndex, offered: StateIndex, place: Place, shared: Sequence[Opening] = ()) -> Told:
    """Collective, when all groups have been made."""
    if place.world_group is None:
        return Told([holding], [offered], [shared], {})
    mine: list[Connection] = [] if place.device.type == "cuda" else connections()
    words = json.dumps(holding.to_json()), json.dumps(offered.to_json()), shared, [one.here for one in mine]
    heard = [words] * place.layout.world
    dist.all_gather_object(heard, words)
    holdings, offers, openings, ends = zip(*heard, strict=True)
    sockets = between_ranks(mine, ends, place.rank)
    return Told(read_indexes(list(holdings)), read_indexes(list(offers)), list(openings), sockets)
