"""Elements that a rank sends along each axis per step, against the formulas of the papers (FORMULAS.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.pipeline_parallel import StageGroups
from tests.parallel.collective_counter import CollectiveCounter
from tests.warm_pool import WarmPool, make_small_config

B, S, H, LAYERS, VOCABULARY, KV = 2, 16, 32, 3, 64, 16  # of a microbatch, and of a model with two key-value heads of 8
SIZES = [f"model.num_layers={LAYERS}", "model.num_kv_heads=2", "train.micro_batch_size=2", "train.global_batch_size=8"]


def count_sent_in_step(trainer: Any) -> dict[str, int]:
    """Run one step and return the elements that this rank sent, by axis."""
    before = dict(read_sent(trainer))
    trainer.train_step(0)
    return {name: value - before[name] for name, value in read_sent(trainer)}


def read_sent(trainer: Any):
    context = trainer.metrics.context
    yield from ((name, axis.traffic.elements) for name, axis in context.axes.items())
    if isinstance(context.stage_groups, StageGroups):
        yield "pp", context.stage_groups.traffic.elements


def run_ranks(pool: WarmPool, *words: str) -> list[dict[str, int]]:
    return pool.inspect_trainers(count_sent_in_step, make_small_config(None, *SIZES, *words))


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel_volume(pool: WarmPool, t: int) -> None:
    """8 b s h (t - 1) / t per layer (gathered inputs are kept), and half as much for the embedding and the head."""
    results = run_ranks(pool, f"cluster.workers={t}", f"parallel.tp={t}", "parallel.dp_replicate=1")
    activations = (8 * LAYERS + 4) * B * S * H * (t - 1) // t
    loss = (2 + 2 * 2) * B * S * (t - 1) // t  # the maximum logit; the sum of exponentials and the target logit
    norms = (2 * LAYERS + 1) * H
    kv = LAYERS * 2 * KV * H if t == 4 else 0  # four ranks do not divide the key-value heads, so they are replicated
    expected = 4 * (activations + loss) + 2 * (norms + kv) * (t - 1) // t
    assert [result["tp"] for result in results] == [expected] * t


@pytest.mark.parametrize("p", [2, 4])
def test_ulysses_volume(pool: WarmPool, p: int) -> None:
    """(b s / P)(2 h + 2 h_kv)(P - 1) / P forward and backward; key-value heads are repeated if ranks outnumber them."""
    results = run_ranks(pool, f"cluster.workers={p}", f"parallel.cp={p}", f"parallel.ulysses={p}")
    kv = max(KV, p * H // 4)
    expected = 4 * LAYERS * 2 * (B * S // p) * (2 * H + 2 * kv) * (p - 1) // p
    assert [result["ulysses"] for result in results] == [expected] * p


@pytest.mark.parametrize("p", [2, 4])
def test_ring_volume(pool: WarmPool, p: int) -> None:
    """2 b s h_kv (P - 1) / P forward; the same backward, plus gradients that travel the full ring."""
    results = run_ranks(pool, f"cluster.workers={p}", f"parallel.cp={p}")
    forward = 2 * B * S * KV * (p - 1) // p
    expected = 4 * LAYERS * (2 * forward + 2 * B * S * KV)
    assert [result["ring"] for result in results] == [expected] * p


def test_pipeline_and_tensor_parallel_volume(pool: WarmPool) -> None:
    """b s h forward and backward per boundary and microbatch; b s h / t with sharded positions."""
    for t in (1, 2):
        words = [f"cluster.workers={3 * t}", "parallel.pp=3", f"parallel.tp={t}"]
        boundary = B * S * H // t
        expected = [4 * boundary * ends for ends in (1, 2, 1) for _ in range(t)]
        assert [result["pp"] for result in run_ranks(pool, *words)] == expected


def count_step_routes(trainer: Any) -> tuple[int, int, int]:
    """Run one step; return (elements sent, routes to other ranks, routes from other ranks)."""
    axis = trainer.metrics.context.axes["ep"]
    local_experts, counts = axis.get_local_range(5), Counter()
    modules = trainer.model_step.model.modules.values()

    def count_routes(router: Router, inputs: Any, outputs: Any) -> None:
        counts.update(outputs[0].flatten().tolist())

    for router in (submodule for module in modules for submodule in module.modules() if isinstance(submodule, Router)):
        router.register_forward_hook(count_routes)
    trainer.train_step(0)
    counts_by_rank: list[Counter] = [Counter()] * axis.size
    dist.all_gather_object(counts_by_rank, counts, group=axis.group)
    num_sent = sum(count for expert, count in counts.items() if expert not in local_experts)
    peer_counts = [rank_counts for rank, rank_counts in enumerate(counts_by_rank) if rank != axis.rank]
    num_received = sum(rank_counts[expert] for rank_counts in peer_counts for expert in local_experts)
    return axis.traffic.elements, num_sent, num_received


def test_expert_parallel_volume(pool: WarmPool) -> None:
    """Each route to another rank goes there and back, forward and backward: 2 h (sent + received) elements.

    Before, ranks exchange the number of rows per expert, in each layer and microbatch.
    """
    words, num_experts = ["model.num_experts=5", "cluster.workers=2", "parallel.ep=2"], 5
    results = pool.inspect_trainers(count_step_routes, make_small_config(None, *SIZES, *words))
    for elements, num_sent, num_received in results:
        assert elements == 2 * H * (num_sent + num_received) + LAYERS * 2 * num_experts
        assert 0 < num_sent < LAYERS * 2 * 2 * B * S  # two microbatches per rank, two experts per position
    assert sum(num_sent for _, num_sent, _ in results) == sum(num_received for _, _, num_received in results)


def count_sent_by_group(trainer: Any) -> list[int]:
    """Run one step; return the elements sent by process group, largest first: that of gradients and weights."""
    with CollectiveCounter() as collectives:
        trainer.train_step(0)
    return [elements for _, elements in collectives.count_by_group().most_common()]


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 5), (3, 12)])
def test_data_parallel_volume(pool: WarmPool, zero: int, times: int) -> None:
    """2 Psi (d - 1) / d; ZeRO-1 the same; ZeRO-2 (m + 1) Psi and ZeRO-3 3 m Psi, with m = 4 microbatches per rank."""
    words = [f"parallel.zero={zero}", "cluster.workers=2", "train.global_batch_size=16", "model.tie_embeddings=false"]
    results = pool.inspect_trainers(count_sent_by_group, make_small_config(None, *SIZES, *words))
    layer = 2 * H * (H + KV) + 3 * H * 128 + 2 * H
    psi = 2 * VOCABULARY * H + LAYERS * layer + H
    for result in results:
        # ZeRO-0 adds one flag per parameter, and the sums of the trainer.
        assert result[0] == pytest.approx(times * psi // 2, rel=0.001)
