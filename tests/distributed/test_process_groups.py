"""Ranks of a generation wait for each other."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.driver.rendezvous_store import RendezvousStore
from raytrain_hpc.elastic.watchdog import compute_timeouts
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


@pytest.mark.parametrize("stall_timeout", ["auto", "0.5", "20", "1000"])
def test_collectives_last_as_long_as_a_rank_may_load_data(stall_timeout: str) -> None:
    """Other ranks wait for it in a collective."""
    config = load_config(None, [f"fault.stall_timeout={stall_timeout}"])
    rendezvous = RendezvousStore("127.0.0.1", config).create_rendezvous(1)
    assert rendezvous.timeout_s >= compute_timeouts(config, [0.1]).slow_phase_s
