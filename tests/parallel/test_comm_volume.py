"""Elements that a rank sends along every axis in a step, against the formulas of the papers (FORMULAS.md)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from raytrain_hpc.model.moe import Router
from raytrain_hpc.parallel.pipeline_parallel import StageGroups
from tests.parallel.collective_counter import CollectiveCounter
from tests.warm_pool import WarmPool, make_small_config

B, S, H, LAYERS, VOCABULARY, KV = 2, 16, 32, 3, 64, 16  # a microbatch, and a model of two key-value heads of 8
SIZES = [f"model.num_layers={LAYERS}", "model.num_kv_heads=2", "train.micro_batch=2", "train.global_batch=8"]


def one_step(trainer: Any) -> dict[str, int]:
    """What each axis of this rank sent in one step, and how many microbatches went through."""
    before = dict(read(trainer))
    trainer.train_step(0)
    return {name: value - before[name] for name, value in read(trainer)}


def read(trainer: Any):
    place = trainer.evaluator.context
    yield from ((name, axis.traffic.elements) for name, axis in place.axes.items())
    if isinstance(place.stage_groups, StageGroups):
        yield "pp", place.stage_groups.traffic.elements


def sent(pool: WarmPool, *words: str) -> list[dict[str, int]]:
    return pool.inspect_trainers(one_step, make_small_config(None, *SIZES, *words))


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallel(pool: WarmPool, t: int) -> None:
    """8 b s h (t - 1) / t a layer (inputs gathered and kept); as much again for half a layer at table and head."""
    of_ranks = sent(pool, f"cluster.workers={t}", f"parallel.tp={t}", "parallel.dp_replicate=1")
    activations = (8 * LAYERS + 4) * B * S * H * (t - 1) // t
    loss = (2 + 2 * 2) * B * S * (t - 1) // t  # the largest logit; the sum of exponentials and the target's logit
    norms = (2 * LAYERS + 1) * H
    kv = LAYERS * 2 * KV * H if t == 4 else 0  # key-value heads that four ranks do not divide are held by all
    expected = 4 * (activations + loss) + 2 * (norms + kv) * (t - 1) // t
    assert [of_rank["tp"] for of_rank in of_ranks] == [expected] * t


@pytest.mark.parametrize("p", [2, 4])
def test_ulysses(pool: WarmPool, p: int) -> None:
    """(b s / P)(2 h + 2 h_kv)(P - 1) / P forward, the same backward; a head of its own for each of more ranks."""
    of_ranks = sent(pool, f"cluster.workers={p}", f"parallel.cp={p}", f"parallel.ulysses={p}")
    kv = max(KV, p * H // 4)
    expected = 4 * LAYERS * 2 * (B * S // p) * (2 * H + 2 * kv) * (p - 1) // p
    assert [of_rank["ulysses"] for of_rank in of_ranks] == [expected] * p


@pytest.mark.parametrize("p", [2, 4])
def test_ring(pool: WarmPool, p: int) -> None:
    """2 b s h_kv (P - 1) / P forward; backward as much again, and the gradients all the way round."""
    of_ranks = sent(pool, f"cluster.workers={p}", f"parallel.cp={p}")
    forward = 2 * B * S * KV * (p - 1) // p
    expected = 4 * LAYERS * (2 * forward + 2 * B * S * KV)
    assert [of_rank["ring"] for of_rank in of_ranks] == [expected] * p


def test_pipeline_with_tensor_parallel(pool: WarmPool) -> None:
    """b s h forward and b s h backward a boundary and microbatch; b s h / t each where positions are shared out."""
    for t in (1, 2):
        words = [f"cluster.workers={3 * t}", "parallel.pp=3", f"parallel.tp={t}"]
        boundary = B * S * H // t
        expected = [4 * boundary * ends for ends in (1, 2, 1) for _ in range(t)]
        assert [of_rank["pp"] for of_rank in sent(pool, *words)] == expected


def routes(trainer: Any) -> tuple[int, int, int]:
    """(Elements sent, choices of experts of other ranks, choices by other ranks of experts here) in one step."""
    axis = trainer.evaluator.context.axes["ep"]
    mine, wanted = axis.get_local_range(5), Counter()
    modules = trainer.model_step.model.modules.values()

    def count(router: Router, inputs: Any, outputs: Any) -> None:
        wanted.update(outputs[0].flatten().tolist())

    for router in (part for module in modules for part in module.modules() if isinstance(part, Router)):
        router.register_forward_hook(count)
    trainer.train_step(0)
    everybody: list[Counter] = [Counter()] * axis.size
    dist.all_gather_object(everybody, wanted, group=axis.group)
    leaving = sum(number for expert, number in wanted.items() if expert not in mine)
    others = [of_rank for rank, of_rank in enumerate(everybody) if rank != axis.rank]
    coming = sum(of_rank[expert] for of_rank in others for expert in mine)
    return axis.traffic.elements, leaving, coming


def test_experts(pool: WarmPool) -> None:
    """Every route to another rank goes there and back, forward and backward: 2 h (leaving + coming) elements."""
    words = ["model.num_experts=5", "cluster.workers=2", "parallel.ep=2"]
    of_ranks = pool.inspect_trainers(routes, make_small_config(None, *SIZES, *words))
    for elements, leaving, coming in of_ranks:
        assert elements == 2 * H * (leaving + coming)
        assert 0 < leaving < LAYERS * 2 * 2 * B * S  # two microbatches a rank, two choices a position
    assert sum(leaving for _, leaving, _ in of_ranks) == sum(coming for _, _, coming in of_ranks)


def data_parallel(trainer: Any) -> list[int]:
    """What the largest user among groups sent in one step: gradients and weights, not the few numbers of the loop."""
    with CollectiveCounter() as collectives:
        trainer.train_step(0)
    return [number for _, number in collectives.count_by_group().most_common()]


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 5), (3, 12)])
def test_data_parallel(pool: WarmPool, zero: int, times: int) -> None:
    """2 Psi (d - 1) / d; ZeRO-1 the same; ZeRO-2 (m + 1) Psi and ZeRO-3 3 m Psi, with m = 4 microbatches a rank."""
    words = [f"parallel.zero={zero}", "cluster.workers=2", "train.global_batch=16", "model.tie_embeddings=false"]
    of_ranks = pool.inspect_trainers(data_parallel, make_small_config(None, *SIZES, *words))
    layer = 2 * H * (H + KV) + 3 * H * 128 + 2 * H
    psi = 2 * VOCABULARY * H + LAYERS * layer + H
    for of_rank in of_ranks:
        # ZeRO-0 adds a mark a parameter, and all the few numbers that the loop sums.
        assert of_rank[0] == pytest.approx(times * psi // 2, rel=0.001)
