"""Warm-up of the compiler in one process: a rank that was warmed up compiles nothing, and trains with the same bits."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from raytrain_hpc.data.samples.sample_dataset import make_sample_dataset
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.runtime.worker_spec import CustomModel, Script
from raytrain_hpc.training.compile_warmup import (
    can_warm_up_compiler,
    list_distinct_ranks,
    list_layouts,
    warm_up_compiler,
)
from tests.data.samples import image_task
from tests.parallel.compiled_run import trace_only
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

if TYPE_CHECKING:
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

CPU, STEPS = torch.device("cpu"), 2
TWO = "cluster.workers=2"
MIXTURE = [*LLAMA, "model.num_kv_heads=1", "model.num_experts=5", "model.load_balancing=bias"]
SETTINGS = {
    "replicas, dropout": [TWO, *GPT2, "model.tie_embeddings=true", "model.dropout=0.1"],
    "ZeRO-3, float8, uneven": [TWO, *LLAMA, "parallel.zero=3", "train.dtype=float8", "train.global_batch_size=9"],
    "tp": [TWO, *LLAMA, "model.num_kv_heads=2", "parallel.tp=2", "parallel.activation_checkpointing=full"],
    "pp, deferred weight gradients, LoRA": [
        *(TWO, *LLAMA, "model.num_layers=4", "parallel.pp=2", "parallel.pp_schedule=zbv", "lora.rank=3")
    ],
    "cp, documents": [TWO, *LLAMA, "parallel.cp=2", "data.packing=documents"],
    "ep": [TWO, *MIXTURE, "parallel.ep=2", "train.global_batch_size=9"],
    "a user's module and samples": [TWO, "parallel.zero=3", "eval.samples=6"],
}
BASE = ["model.vocab_size=65", "model.ffn_size=50", "train.seq_len=15", "train.micro_batch_size=3"]


@dataclass(frozen=True)
class Observation:
    """What a rank observed: losses, and how many graphs were compiled before training and after it."""

    losses: list[float]
    grad_norms: list[float]
    val_loss: float
    num_graphs_before: int
    num_graphs_after: int


def train(rank: int, rendezvous: Rendezvous, spec: WorkerSpec, warmup_spec: WorkerSpec | None) -> Observation:
    """Train and evaluate with compiled blocks."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    torch._dynamo.reset()
    counters.clear()
    with trace_only():
        if warmup_spec is not None:
            generator_state = torch.get_rng_state()
            warm_up_compiler(warmup_spec, CPU)
            assert not torch.distributed.is_initialized() and torch.equal(torch.get_rng_state(), generator_state)
            assert not any(isinstance(instance, Decoder) for instance in gc.get_objects())
        before = counters["stats"]["unique_graphs"]
        trainer = build_trainer(spec, rank, CPU, rendezvous, ControlChannel())
        results = [trainer.train_step(step) for step in range(STEPS)]
        evaluator: Any = trainer.completion.evaluator
        val_loss = evaluator.evaluate()["val/loss"]
    after = counters["stats"]["unique_graphs"]
    return Observation([r.loss for r in results], [r.grad_norm for r in results], val_loss, before, after)


def make_images() -> CustomModel:
    validation = {"": image_task.Images(6, 1, augment=False)}
    return CustomModel(image_task.build, image_task.loss, dataset=make_sample_dataset(image_task.Images(), validation))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_rank_that_was_warmed_up_compiles_nothing(pool: WarmPool, name: str) -> None:
    """Every process is warmed up for every rank, and becomes one of them."""
    config = make_small_config(None, *BASE, *SETTINGS[name], "train.compile=true")
    world_size = int(config.cluster.workers)
    custom = make_images() if name == "a user's module and samples" else None
    spec = make_worker_spec(config, world_size, steps_to=STEPS, custom=custom)
    # A run of two ZeRO shards that has lost one warms up the replacement on a single shard.
    warmup_spec = replace(spec, layout=replace(spec.layout, dp_shard=1))
    cold, warm = (pool.call(train, world_size, spec, warmup) for warmup in (None, warmup_spec))
    for expected, observed in zip(cold, warm, strict=True):
        assert observed.num_graphs_after == observed.num_graphs_before > 0
        assert expected.num_graphs_after > expected.num_graphs_before == 0
        assert (observed.losses, observed.grad_norms) == (expected.losses, expected.grad_norms)
        assert observed.val_loss == expected.val_loss


def test_what_cannot_be_warmed_up() -> None:
    spec = make_worker_spec(make_small_config(None, "train.compile=true"), 1, steps_to=STEPS)
    assert can_warm_up_compiler(spec)
    assert not can_warm_up_compiler(replace(spec, custom=Script("train.py")))
    for dataset, expected in ((image_task.Images(), True), (iter_images, False)):
        custom = CustomModel(image_task.build, image_task.loss, dataset=make_sample_dataset(dataset))
        assert can_warm_up_compiler(replace(spec, custom=custom)) == expected
    assert not can_warm_up_compiler(make_worker_spec(make_small_config(None, "train.compile=false"), 1, steps_to=STEPS))


def iter_images(rank: int, world_size: int) -> Any:
    return iter(())


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (Layout(dp_replicate=4), [0]),
        (Layout(dp_shard=2, tp=2, pp=2, zero=1), [0, 1, 4, 5]),
        (Layout(dp_replicate=2, cp=2), [0, 1]),
        (Layout(dp_shard=4, ep=2, zero=2), [0, 1]),
    ],
)
def test_ranks_that_differ_in_more_than_their_data(layout: Layout, ranks: list[int]) -> None:
    assert list_distinct_ranks(layout) == ranks


def test_layouts_to_which_a_run_grows() -> None:
    assert list_layouts(Layout(dp_replicate=2), 0) == [Layout(dp_replicate=2)]
    assert list_layouts(Layout(dp_shard=4, zero=3), 2) == [Layout(dp_shard=4, zero=3)]
    single = Layout(tp=2, zero=3)
    assert list_layouts(single, 0) == [single, Layout(dp_shard=2, tp=2, zero=3)]
    assert list_layouts(single, 4) == [single, Layout(dp_shard=4, tp=2, zero=3)]


def warm_up_in_parts(rank: int, rendezvous: Rendezvous, spec: WorkerSpec, parts: list[int]) -> list[int]:
    """Return how many graphs each of several warm-ups adds; `parts`: after how many ranks each is cancelled."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    counts = [0]
    with trace_only():
        for part in parts:
            warm_up_compiler(spec, CPU, partial(next, iter([*[False] * part, True])))
            counts.append(counters["stats"]["unique_graphs"])
    return [after - before for before, after in pairwise(counts)]


@pytest.mark.parametrize(("tp", "counts"), [(2, [0, 5, 2]), (6, [0, 16, 2])])
def test_a_cancelled_warm_up_ends_after_the_rank_that_it_compiles_for(
    pool: WarmPool, tp: int, counts: list[int]
) -> None:
    """Another warm-up compiles the missing graphs only; for six ranks, more versions are kept than the default of 8.

    Two graphs per rank for its blocks, and three of the loss for each size of a vocabulary shard: on six ranks, two.
    """
    words = [f"cluster.workers={tp}", f"parallel.tp={tp}", "model.num_heads=6", "model.hidden_size=48"]
    spec = make_worker_spec(make_small_config(None, *LLAMA, *words, "train.compile=true"), tp, steps_to=STEPS)
    assert pool.call(warm_up_in_parts, 1, spec, [0, tp - 1, tp]) == [counts]
