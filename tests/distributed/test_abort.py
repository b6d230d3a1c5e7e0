"""Aborting collectives of a rank that waits for an absent peer, and forming new process groups afterwards."""

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
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, destroy_process_groups, init_process_groups
from raytrain_hpc.driver.node_agent import NodeAgent, WatchedProcess
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.state.shard_index import StateIndex
from tests.warm_pool import WarmPool, make_small_config

ABSENT_S = 4.0


def abort_while_rank_2_is_absent(rank: int, rendezvous: Any, layout: Layout) -> tuple[float, str, float]:
    """Abort a collective in which rank 2 does not take part, then form new groups.

    Returns the seconds until this rank was free, the error message, and a sum over all ranks in the new groups.
    """
    cpu = torch.device("cpu")
    context = init_process_groups(rendezvous, rank, layout, cpu)
    own, other = socket.socketpair()
    outside = socket.create_connection((rendezvous.host, rendezvous.port))
    abort = CollectiveAbort(exchange_peer_info(StateIndex(), StateIndex(), context).peer_sockets)
    start, message = time.monotonic(), ""
    if rank == 2:
        time.sleep(ABSENT_S)
    else:
        threading.Timer(0.2, abort).start()
        try:
            dist.all_reduce(torch.ones(1 << 20))
        except RuntimeError as error:
            message = str(error)
    freed_s = time.monotonic() - start
    assert abort.is_aborted is (rank != 2)
    abort.disarm()
    destroy_process_groups()
    abort()  # disarmed: must not touch the files that have these descriptors now
    own.send(b"whole")
    assert other.recv(5) == b"whole" and outside.getpeername()[1] == rendezvous.port
    for connection in (own, other, outside):
        connection.close()
    init_process_groups(replace(rendezvous, generation=rendezvous.generation + 1000), rank, layout, cpu)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return freed_s, message, float(total)


def test_abort_frees_ranks_that_wait_for_an_absent_peer(pool: WarmPool) -> None:
    results = pool.call(abort_while_rank_2_is_absent, 3, Layout(dp_replicate=3))
    for freed_s, message, _ in results[:2]:
        assert freed_s < ABSENT_S / 2 and "gloo" in message
    assert [total for _, _, total in results] == [6.0] * 3


def abort_while_groups_are_created(
    rank: int, rendezvous: Any, layout: Layout, leaves_at: str
) -> tuple[float, str, float]:
    """Create groups, for which rank 2 leaves or stops; abort, then form new ones. Return as the function above."""
    from raytrain_hpc.distributed import process_groups

    cpu, aborts = torch.device("cpu"), list[CollectiveAbort]()
    start, message = time.monotonic(), ""
    if rank == 2:
        store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
        prefixed_store = dist.PrefixStore(f"generation-{rendezvous.generation}", store)
        process_groups._wait_for_all_ranks(prefixed_store, 3, 60.0)
        if leaves_at == "a subgroup":
            dist.init_process_group("gloo", store=prefixed_store, rank=2, world_size=3)
        time.sleep(ABSENT_S)
    else:
        threading.Timer(0.5, lambda: aborts[0]()).start()
        try:
            init_process_groups(rendezvous, rank, layout, cpu, arm_abort=aborts.append, balance_experts=True)
        except GenerationAbortedError as error:
            message = str(error)
    freed_s = time.monotonic() - start
    destroy_process_groups()
    init_process_groups(replace(rendezvous, generation=rendezvous.generation + 1000), rank, layout, cpu)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return freed_s, message, float(total)


@pytest.mark.parametrize("leaves_at", ["the default group", "a subgroup"])
def test_abort_frees_ranks_whose_peer_is_lost_while_groups_are_created(pool: WarmPool, leaves_at: str) -> None:
    results = pool.call(abort_while_groups_are_created, 3, Layout(dp_shard=3, zero=1), leaves_at)
    for freed_s, message, _ in results[:2]:
        assert freed_s < ABSENT_S / 2 and message == "a rank was lost while process groups were created"
    assert [total for _, _, total in results] == [6.0] * 3


def test_a_node_agent_without_requests_from_the_driver_kills_its_workers() -> None:
    """As after a network partition: the workers on the driver's side continue without this node."""
    worker = "from raytrain_hpc.runtime.heartbeat import Heartbeat as H; h = H(); h.set_phase('training')"
    worker += "; print(h.path, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", worker], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        agent = NodeAgent(make_small_config(), orphan_timeout_s=1.0)
        agent.watch({0: WatchedProcess(process.pid, process.stdout.readline().strip())})
        for _ in range(20):
            time.sleep(0.1)
            assert agent.get_health().workers is not None and process.poll() is None, "requests keep the workers alive"
        assert process.wait(timeout=30) == -signal.SIGKILL
        assert list(agent._heartbeat_of_pid) == [process.pid]
        agent.watch({})
        assert not agent._heartbeat_of_pid, "of processes that have ended, nothing is kept"
        agent.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_nccl_group_is_aborted_and_formed_again() -> None:
    """Abort a collective that is queued after a kernel of several seconds.

    One rank only, since NCCL does not allow two on one GPU.
    """
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
