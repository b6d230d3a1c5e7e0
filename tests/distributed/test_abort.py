"""A rank that waits for one that neither comes nor goes is freed from another thread, and meets the others again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import exchange_peer_info
from raytrain_hpc.distributed.process_groups import destroy_process_groups, init_process_groups
from raytrain_hpc.driver.node_agent import NodeAgent
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.state.shard_index import StateIndex
from tests.warm_pool import WarmPool, make_small_config

AWAY_S = 4.0


def absent_and_freed(rank: int, meeting: Any, layout: Layout) -> tuple[float, str, float]:
    """Rank 2 stays away from a collective. Seconds until this rank is through, what it raised, and a later sum."""
    cpu = torch.device("cpu")
    place = init_process_groups(meeting, rank, layout, cpu)
    own, other = socket.socketpair()
    outside = socket.create_connection((meeting.host, meeting.port))
    abort = CollectiveAbort(exchange_peer_info(StateIndex(), StateIndex(), place).peer_sockets)
    began, raised = time.monotonic(), ""
    if rank == 2:
        time.sleep(AWAY_S)
    else:
        threading.Timer(0.2, abort).start()
        try:
            dist.all_reduce(torch.ones(1 << 20))
        except RuntimeError as error:
            raised = str(error)
    freed_s = time.monotonic() - began
    assert abort.is_aborted is (rank != 2)
    abort.disarm()
    destroy_process_groups()
    abort()  # too late: whatever has these descriptors now is none of its business
    own.send(b"whole")
    assert other.recv(5) == b"whole" and outside.getpeername()[1] == meeting.port
    for connection in (own, other, outside):
        connection.close()
    init_process_groups(replace(meeting, generation=meeting.generation + 1000), rank, layout, cpu)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return freed_s, raised, float(total)


def test_a_rank_that_stays_away(pool: WarmPool) -> None:
    found = pool.call(absent_and_freed, 3, Layout(dp_replicate=3))
    for freed_s, raised, _ in found[:2]:
        assert freed_s < AWAY_S / 2 and "gloo" in raised
    assert [total for _, _, total in found] == [6.0] * 3


def test_an_agent_that_nobody_asks_ends_its_workers() -> None:
    """Its node is cut off: the others go on without it."""
    worker = "from raytrain_hpc.runtime.heartbeat import Heartbeat as H; h = H(); h.mark('training')"
    worker += "; print(h.path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", worker], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        agent = NodeAgent(make_small_config(), orphan_timeout_s=1.0)
        agent.watch({0: (process.pid, process.stdout.readline().strip())})
        for _ in range(20):
            time.sleep(0.1)
            assert agent.get_health().workers is not None and process.poll() is None, "somebody asks"
        assert process.wait(timeout=30) == -signal.SIGKILL
        agent.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_is_aborted_and_formed_again() -> None:
    """One rank, since NCCL refuses two on a GPU: a collective behind a kernel that takes seconds."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    device = torch.device("cuda", 0)
    for generation in range(2):
        store = dist.HashStore()
        dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
        value = torch.ones(1 << 20, device=device)
        dist.all_reduce(value)
        assert float(value[0]) == 1.0
        if generation == 0:
            abort = CollectiveAbort({})
            torch.cuda._sleep(1 << 32)
            dist.all_reduce(value, async_op=True)
            abort()
            torch.cuda.synchronize()
            assert abort.is_aborted
        dist.destroy_process_group()
