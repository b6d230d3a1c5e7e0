"""Bytes of training state and activations on a rank, against the estimate of the planner."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.planner.activation_memory import compute_layer_bytes_per_token
from raytrain_hpc.planner.model_state_memory import compute_state_bytes, count_max_rank_parameters
from raytrain_hpc.planner.workload import make_workload
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.train_module import Batch
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, make_small_config

WORDS = [
    "model.hidden_size=128",
    "model.num_layers=4",
    "model.vocab_size=64",
    "train.micro_batch_size=1",
    "train.seq_len=16",
    "train.global_batch_size=12",
]
MOE = ["model.num_experts=4", "model.experts_per_token=2", "model.ffn_size=96", "model.shared_expert_size=64"]
QWEN3 = ["model.num_kv_heads=2", "model.head_dim=48", "model.qk_norm=true"]
FAMILIES = {
    "gpt2": [*GPT2, "model.dropout=0.1"],
    "llama": [*LLAMA, "model.num_kv_heads=2"],
    "qwen3": [*LLAMA, *QWEN3],
    "experts": [*LLAMA, "model.num_kv_heads=2", *MOE],
}
EXPERTS = ["model.num_experts=4", "model.ffn_size=64", "parallel.ep=2"]
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "alone, moments in bf16": ["cluster.workers=1", "optimizer.moment_dtype=bf16"],
    "dp-2": ["cluster.workers=2"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero2-2": ["cluster.workers=2", "parallel.zero=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "zero3-2 x tp-2": ["cluster.workers=4", "parallel.zero=3", "parallel.tp=2"],
    "pp-2, untied": ["cluster.workers=2", "parallel.pp=2", "model.tie_embeddings=false"],
    "pp-2 x zero3-2, zbv": ["cluster.workers=4", "parallel.pp=2", "parallel.zero=3", "parallel.pp_schedule=zbv"],
    "zero3-4, ep-2": ["cluster.workers=4", "parallel.zero=3", *EXPERTS],
}


class AllocationTracker(TorchDispatchMode):
    """Tracks the storages that are allocated under it, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._allocated: weakref.WeakSet[Any] = weakref.WeakSet()
        self._excluded: weakref.WeakSet[Any] = weakref.WeakSet()

    def exclude(self, tensors: Any) -> None:
        storages = {tensor.untyped_storage() for tensor in tensors}
        self._excluded |= storages
        self._allocated -= storages

    def count_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._allocated)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta:
                continue
            if (storage := tensor.untyped_storage()) not in self._excluded:
                self._allocated.add(storage)
        return result


def measure_state(rank: int, rendezvous: Any, spec: Any) -> int:
    """Return the most bytes allocated between passes: weights, gradients and moments.

    Counted after the last backward pass of a step and, without a pipeline, between microbatches. FSDP2 then also keeps
    the root gradients that it reduced last, but the tables are small here.
    """
    counts = []
    with AllocationTracker() as tracker:
        trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())

        def count_then_call(function: Any, *args: Any) -> Any:
            counts.append(wait_for_stable_bytes(tracker))
            return function(*args)

        trainer.model_step.model.finish_grad_sync = partial(count_then_call, trainer.model_step.model.finish_grad_sync)
        if spec.layout.pp == 1:
            trainer.loader.read = partial(count_then_call, trainer.loader.read)
        trainer.train_step(0)
    return max(counts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_memory_matches_the_plan(pool: WarmPool, layout: str) -> None:
    config = make_small_config(None, *WORDS, *LAYOUTS[layout])
    prepared = prepare_run(config, None, print)
    resolved, _ = prepared.resolve_layout(int(config.cluster.workers))
    parameters, workload = (
        count_max_rank_parameters(prepared.model_spec, resolved, 16),
        make_workload(config, prepared.model_spec),
    )
    planned = compute_state_bytes(parameters, resolved, workload)
    measured = pool.inspect_trainers(measure_state, config, build=False)
    assert max(measured) == pytest.approx(planned, rel=0.02)


def wait_for_stable_bytes(tracker: AllocationTracker) -> int:
    """Return the bytes that stay allocated: threads of a collective keep its tensors for a moment."""
    gc.collect()
    counts = [tracker.count_bytes()]
    while len(counts) < 5 or counts[-1] < min(counts[-5:-1]):
        time.sleep(0.02)
        counts.append(tracker.count_bytes())
    return counts[-1]


def measure_activations(trainer: Any) -> int:
    """Return the bytes that the forward pass of one microbatch leaves allocated."""
    train_module, module = trainer.model_step.train_module, trainer.model_step.model.modules[0]
    batch: Batch = trainer.loader.read(0, 0)
    tracker = AllocationTracker()
    tracker.exclude([*module.parameters(), *module.buffers(), batch.inputs, batch.targets])
    with tracker:
        output = train_module.forward(module, batch.inputs, 0, batch)
        num_bytes = wait_for_stable_bytes(tracker)
    train_module.loss(output, batch)[0].backward()  # so that no rank is left waiting for its peers
    return num_bytes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_memory_matches_the_plan(pool: WarmPool, family: str, recompute: str, tp: int) -> None:
    measured = []
    for layers in (2, 4):
        words = [f"model.num_layers={layers}", f"cluster.workers={tp}", f"parallel.tp={tp}"]
        config = make_small_config(
            None,
            *WORDS,
            *FAMILIES[family],
            *words,
            f"parallel.activation_checkpointing={recompute}",
            "train.seq_len=64",
        )
        measured.append(pool.inspect_trainers(measure_activations, config)[0])
    spec = prepare_run(config, None, print).model_spec
    planned = compute_layer_bytes_per_token(spec, tp=tp, dtype="fp32", recompute=recompute)
    assert (measured[1] - measured[0]) / 2 / 64 == pytest.approx(planned, rel=0.1), (measured, planned)
