"""Ranks of a generation arrive at different times."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.planner.layout import Layout
from tests.warm_pool import WarmPool

_TIMEOUT_S = 3.0


def arrive(rank: int, rendezvous: Rendezvous) -> float:
    """Arrive, as rank 1 after the timeout of the rendezvous, and return how long this rank has waited for others."""
    if rank == 1:
        time.sleep(_TIMEOUT_S + 0.5)
    began = time.monotonic()
    short = replace(rendezvous, timeout_s=_TIMEOUT_S)
    init_process_groups(short, rank, Layout(dp_replicate=2), torch.device("cpu"), arrival_timeout_s=60.0)
    waited_s = time.monotonic() - began
    dist.barrier()  # both have the group: the end of this call destroys it
    return waited_s


def test_ranks_wait_longer_for_one_that_copies_a_dataset(pool: WarmPool) -> None:
    assert pool.call(arrive, 2)[0] > _TIMEOUT_S
