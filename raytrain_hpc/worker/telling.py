"""What the ranks of a generation tell each other when it begins, all at once: each exchange costs milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from raytrain_hpc.state.exchange import read_indexes
from raytrain_hpc.state.index import StateIndex
from raytrain_hpc.worker.abort import Connection, between_ranks, connections
from raytrain_hpc.worker.groups import Place


@dataclass(frozen=True)
class Told:
    """By rank: what each is to hold, and what each has to offer of it. `sockets`: this rank's to the others, by their
    descriptors."""

    holdings: list[StateIndex]
    offers: list[StateIndex]
    sockets: Mapping[int, str]


def tell(holding: StateIndex, offered: StateIndex, place: Place) -> Told:
    """Collective, when all groups have been made."""
    if place.world_group is None:
        return Told([holding], [offered], {})
    mine: list[Connection] = [] if place.device.type == "cuda" else connections()
    words = json.dumps(holding.to_json()), json.dumps(offered.to_json()), [one.here for one in mine]
    heard = [words] * place.layout.world
    dist.all_gather_object(heard, words)
    sockets = between_ranks(mine, [ends for _, _, ends in heard], place.rank)
    return Told(read_indexes([text for text, _, _ in heard]), read_indexes([text for _, text, _ in heard]), sockets)
