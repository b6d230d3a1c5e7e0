"""Peak bytes allocated on a rank within a step, against the estimate of the planner."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._pytree import tree_leaves

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.optim import grad_norm
from raytrain_hpc.parallel import activation_offload
from raytrain_hpc.planner.memory_model import MemoryFootprint, MemoryModel
from raytrain_hpc.planner.workload import make_choice, make_workload
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.state import tensor_hash
from raytrain_hpc.training.builder import build_trainer
from tests.parallel.layout_run import GPT2, LLAMA
from tests.parallel.test_state_memory import AllocationTracker
from tests.warm_pool import WarmPool, make_small_config

SIZES = ["model.hidden_size=64", "model.num_layers=4", "model.vocab_size=128", "train.seq_len=64"]
BATCH = ["train.global_batch_size=16", "train.micro_batch_size=2"]
FAMILIES = {"gpt2": [*GPT2, "model.dropout=0.1"], "llama": [*LLAMA, "model.num_kv_heads=2"]}
SELECTIVE, FULL = ([f"parallel.activation_checkpointing={policy}"] for policy in ("selective", "full"))
OFFLOAD = ["parallel.activation_offload=cpu"]
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "alone, long": ["cluster.workers=1", "train.micro_batch_size=8"],
    "alone, one microbatch": ["cluster.workers=1", "train.micro_batch_size=16"],
    "alone, selective": ["cluster.workers=1", *SELECTIVE],
    "alone, full": ["cluster.workers=1", *FULL],
    "alone, full in one layer": ["cluster.workers=1", *FULL, "parallel.recompute_layers=1"],
    "alone, selective in two layers": ["cluster.workers=1", *SELECTIVE, "parallel.recompute_layers=2"],
    "alone, offload": ["cluster.workers=1", *OFFLOAD],
    "alone, selective and offload": ["cluster.workers=1", *SELECTIVE, *OFFLOAD],
    "alone, full in three layers and offload": ["cluster.workers=1", *FULL, *OFFLOAD, "parallel.recompute_layers=3"],
    "alone, one microbatch, full in two layers": [
        "cluster.workers=1",
        "train.micro_batch_size=16",
        *FULL,
        "parallel.recompute_layers=2",
    ],
    "pp-2, full in one layer": ["cluster.workers=2", "parallel.pp=2", *FULL, "parallel.recompute_layers=1"],
    "pp-2, offload": ["cluster.workers=2", "parallel.pp=2", *OFFLOAD],
    "pp-2, zbv": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv"],
    "pp-2, zbv, full": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv", *FULL],
    "pp-2, zbv, offload": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv", *OFFLOAD],
    "dp-2": ["cluster.workers=2"],
    "dp-2, one microbatch each": ["cluster.workers=2", "train.micro_batch_size=8"],
    "zero3-2, one microbatch each": ["cluster.workers=2", "train.micro_batch_size=8", "parallel.zero=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero2-2": ["cluster.workers=2", "parallel.zero=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "cp-2": ["cluster.workers=2", "parallel.cp=2"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "pp-2, many microbatches": ["cluster.workers=2", "parallel.pp=2", "train.global_batch_size=64"],
    "pp-2, gpipe": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=gpipe"],
    "pp-2 x tp-2": ["cluster.workers=4", "parallel.pp=2", "parallel.tp=2"],
    "zero3-2 x tp-2": ["cluster.workers=4", "parallel.zero=3", "parallel.tp=2"],
}


class PeakTracker(AllocationTracker):
    """Tracks the peak of allocated bytes.

    Bytes are counted when new storages could have raised the peak, and every 16 operations, since FSDP2 resizes
    storages without an operation.
    """

    peak = 0
    _upper_bound, _num_ops = 0, 0

    def include_live_tensors(self) -> None:
        """Count the tensors that exist already: weights and moments."""
        gc.collect()
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                self._allocated.add(tensor.untyped_storage())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        new_tensors = [
            tensor
            for tensor in tree_leaves(result)
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"
        ]
        self._upper_bound += sum(
            tensor.untyped_storage().nbytes() for tensor in new_tensors if type(tensor) is torch.Tensor
        )
        self._num_ops += 1
        if self._upper_bound > self.peak or self._num_ops == 16:
            self._upper_bound, self._num_ops = self.count_bytes(), 0
            self.peak = max(self.peak, self._upper_bound)
        return result


@pytest.fixture(scope="module")
def pool() -> Iterator[WarmPool]:
    """Processes for this file alone: tensors that other tests keep would count."""
    warm_pool = WarmPool()
    yield warm_pool
    warm_pool.close()


def measure_peak(rank: int, rendezvous: Any, spec: Any) -> int:
    """Return the peak bytes of the second step: the first one creates the optimizer moments.

    Without what activation offload copies to the host, which has the same memory here.
    """
    tensor_hash._get_weights.cache_clear()  # of audits in earlier tests of this process
    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
    trainer.train_step(0)
    tracker = PeakTracker()
    tracker.include_live_tensors()
    allocate_host_bytes = activation_offload.allocate_host_bytes

    def allocate_untracked(count: int, *, pinned: bool) -> torch.Tensor:
        host_bytes = allocate_host_bytes(count, pinned=pinned)
        tracker.exclude([host_bytes])
        return host_bytes

    with tracker, patch.object(activation_offload, "allocate_host_bytes", allocate_untracked):
        trainer.train_step(1)
    return tracker.peak


def test_partial_recomputation_needs_memory_between_none_and_full(pool: WarmPool) -> None:
    words = [*SIZES, *BATCH, *FAMILIES["llama"], "cluster.workers=1"]
    counts = ([], *([*FULL, f"parallel.recompute_layers={count}"] for count in (1, 3, 0)))
    peaks = [
        pool.inspect_trainers(measure_peak, make_small_config(None, *words, *more), build=False)[0] for more in counts
    ]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4, "none, 1, 3 and all of 4 layers"


def measure_peak_with_small_chunks(rank: int, rendezvous: Any, spec: Any) -> int:
    """Return the peak as in a larger model, in which the chunks that the gradient norm squares are a small part."""
    with patch.object(grad_norm, "_CACHED_ELEMENTS", 2048):
        return measure_peak(rank, rendezvous, spec)


def plan_and_measure(pool: WarmPool, *words: str) -> tuple[MemoryFootprint, int]:
    config = make_small_config(None, *words)
    prepared = prepare_run(config, None, print)
    resolved, batching = prepared.resolve_layout(int(config.cluster.workers))
    choice = make_choice(config, resolved, batching)
    planned = MemoryModel(make_workload(config, prepared.model_spec)).estimate_footprint(choice)
    return planned, max(pool.inspect_trainers(measure_peak_with_small_chunks, config, build=False))


@pytest.mark.parametrize("microbatches", [1, 4])  # of each rank
@pytest.mark.parametrize("layout", ["alone", "dp-2", "zero1-2", "zero2-2", "zero3-2"])
def test_partial_sums_of_elastic_determinism_are_planned(pool: WarmPool, layout: str, microbatches: int) -> None:
    batch = microbatches if layout == "alone" else 2 * microbatches
    words = [*SIZES, *FAMILIES["llama"], *LAYOUTS[layout], f"train.global_batch_size={batch}"]
    short = ["train.micro_batch_size=1", "train.seq_len=16", "train.deterministic=elastic"]
    planned, measured = plan_and_measure(pool, *words, *short)
    assert measured == pytest.approx(planned.allocated, rel=0.1)


@pytest.mark.parametrize("layout", ["alone", "dp-2", "zero2-2", "zero3-2 x tp-2"])
def test_audits_are_planned(pool: WarmPool, layout: str) -> None:
    """The model has fewer bytes than audits copy at a time, and few activations: audits determine the peak."""
    short = ["train.micro_batch_size=1", "train.seq_len=16", "train.global_batch_size=4", "train.deterministic=elastic"]
    words = [*SIZES, *FAMILIES["llama"], *LAYOUTS[layout], *short]
    (unaudited, _), (planned, measured) = (
        plan_and_measure(pool, *words),
        plan_and_measure(pool, *words, "fault.audit_interval=1"),
    )
    assert planned.allocated > unaudited.allocated
    assert 0.95 * measured < planned.allocated < 1.3 * measured


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_memory_matches_the_plan(pool: WarmPool, layout: str, family: str) -> None:
    planned, measured = plan_and_measure(pool, *SIZES, *BATCH, *FAMILIES[family], *LAYOUTS[layout])
    assert measured == pytest.approx(planned.allocated, rel=0.05)
