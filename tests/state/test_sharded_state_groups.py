"""Slices of DTensors, broadcast and the replica comparison in separate processes on gloo."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import (
    ShardedState,
    StateShard,
    compute_digest,
    find_divergent_ranks,
    get_local_slice,
)
from tests.warm_pool import make_forkserver_context

RANKS = 4
TIMEOUT_S = 60
PLACEMENTS = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(1)),
    "grid": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "replicas": (Replicate(), Replicate()),
}


def describe_slice(tensor):
    """Return global shape, box, local content and digest of this rank's slice."""
    shape, box, local = get_local_slice(tensor)
    digest = compute_digest(ShardedState([StateShard("w", shape, "float32", box, local)]))
    return shape, box, local.tolist(), digest


def apply_fsdp_over_tp(tensor, mesh):
    """Return a row-sharded weight after FSDP2: a strided shard before a plain one, on the same dimension."""
    layer = torch.nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    layer.weight = torch.nn.Parameter(distribute_tensor(tensor, mesh["tp"], [Shard(0)]))
    fully_shard(layer, mesh=mesh["dp"])
    assert any(isinstance(placement, _StridedShard) for placement in layer.weight.placements)
    return layer.weight


def run_rank(rank, port, results):
    """Run everything that needs a process group on one rank, and put the results into a queue."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    slices = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (9, 3, 1):
        tensor = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5)
        for name, placements in PLACEMENTS.items():
            slices[rows, name] = describe_slice(distribute_tensor(tensor, mesh, placements))
        slices[rows, "fsdp over tp"] = describe_slice(apply_fsdp_over_tp(tensor, mesh))
    refusals = []
    partial = torch.distributed.tensor.DTensor.from_local(tensor, mesh, [Partial(), Replicate()])
    scattered = torch.distributed.tensor.DTensor.from_local(
        tensor, mesh, [Replicate(), _StridedShard(0, split_factor=2)]
    )
    for unsupported in (partial, scattered):
        try:
            get_local_slice(unsupported)
        except ValueError as error:
            refusals.append(str(error))
    torch.manual_seed(rank)
    tensors = [torch.randn(3, 7), torch.randn(2_000_000, dtype=torch.float32), torch.tensor(rank), torch.randn(0, 4)]
    tensors += [torch.randn(14_000_000).bfloat16(), torch.randn(6, 4).t(), torch.nn.Parameter(torch.randn(5))]
    state = ShardedState(StateShard.from_tensor(f"t{number}", tensor) for number, tensor in enumerate(tensors))
    before_broadcast = find_divergent_ranks(state, group, torch.device("cpu"))
    for shard in state:
        contiguous = shard.tensor.contiguous()
        dist.broadcast(contiguous, 2)
        shard.tensor.copy_(contiguous)
    after_broadcast = find_divergent_ranks(state, group, torch.device("cpu"))
    if rank == 3:
        tensors[1].view(torch.int32)[1_999_999] ^= 1 << 30
    after_flip = find_divergent_ranks(state, group, torch.device("cpu"))
    torch.manual_seed(2)
    is_from_rank_2 = torch.equal(tensors[0], torch.randn(3, 7)) and int(tensors[2]) == 2
    results.put((rank, slices, refusals, before_broadcast, after_broadcast, after_flip, is_from_rank_2))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results_by_rank():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = make_forkserver_context()
    results = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, port, results), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    try:
        return {rank: rest for rank, *rest in (results.get(timeout=TIMEOUT_S) for _ in range(RANKS))}
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("rows", [9, 3, 1])
@pytest.mark.parametrize("name", [*PLACEMENTS, "fsdp over tp"])
def test_slices_of_a_dtensor_tile_the_global_tensor(results_by_rank, rows, name):
    tensor = torch.arange(rows * 5, dtype=torch.float32).reshape(rows, 5)
    covered = torch.zeros(rows, 5)
    total = 0
    for rank in range(RANKS):
        shape, box, local, digest = results_by_rank[rank][0][rows, name]
        assert shape == (rows, 5)
        expected = tensor[box.to_slices(Box.from_shape(shape))]
        assert torch.equal(torch.tensor(local).reshape(expected.shape), expected)
        covered[box.to_slices(Box.from_shape(shape))] += 1
        total += digest
    placements = PLACEMENTS.get(name, (Shard(0), Shard(0)))
    replicas = RANKS // 2 ** sum(not placement.is_replicate() for placement in placements)
    assert (covered == replicas).all()
    whole_digest = compute_digest(ShardedState([StateShard.from_tensor("w", tensor)]))
    assert total % 2**64 == replicas * whole_digest % 2**64


def test_a_partial_sum_and_scattered_rows_are_refused(results_by_rank):
    partial, scattered = results_by_rank[0][1]
    assert "partial sum" in partial and "not adjacent" in scattered


def test_broadcast_makes_replicas_equal_and_a_flipped_bit_is_detected(results_by_rank):
    for rank in range(RANKS):
        _, _, before_broadcast, after_broadcast, after_flip, is_from_rank_2 = results_by_rank[rank]
        assert before_broadcast == [1, 2, 3], "all contents differ, so the lowest rank is the reference"
        assert after_broadcast == [] and is_from_rank_2
        assert after_flip == [3]
