"""Audits by spares: they compute a microbatch of a running generation again, in processes of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples import custom_module
from raytrain_hpc.runtime.audit_sample import AuditSample
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.spare_audit import compute_again
from tests.training.elastic_runs import BASE, MODELS
from tests.training.normalized_bigram import build_normalized_bigram
from tests.training.test_step_audits import LAYOUTS
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

CPU = torch.device("cpu")
LLAMA = MODELS["llama"]
SAMPLED = ["cluster.spares=1", "fault.audit_interval=1000", "fault.spare_audit_interval=1"]


def train_with_samples(rank: int, rendezvous: Any, spec: Any) -> tuple[Any, Any, list[float]]:
    """Train to the end of the spec, and return the last sample, its weights, and the losses."""
    control = ControlChannel()
    build_trainer(spec, rank, CPU, rendezvous, control).run(spec.start_step, spec.end_step)
    steps = get_step_metrics(control.drain())
    return *control.samples.take(-1), [metrics["train/loss"] for metrics in steps]


def audit(rank: int, rendezvous: Any, spec: Any, samples: list[AuditSample], weights: list[Any]) -> Any:
    """Compute what the samples have computed as one of the spares."""
    by_source = [(sample.index, block) for sample, block in zip(samples, weights, strict=True) if block is not None]
    plan = samples[0].audit
    batch = next(sample for sample in samples if sample.rank == plan.ranks[rank]).batch
    return compute_again(spec, plan, rank, CPU, rendezvous, by_source, batch)


def run_audit(pool: WarmPool, words: list[str], *, steps: int = 2, custom: Any = None) -> tuple[Any, Any]:
    """Train and audit the last step; return the traces of the audited ranks, and those of the spares."""
    config = make_small_config(None, *BASE, *words, *SAMPLED)
    spec = make_worker_spec(config, int(config.cluster.workers), steps_to=steps, custom=custom)
    results = pool.call(train_with_samples, spec.layout.world_size, spec)
    taken = [(sample, weights) for sample, weights, _ in results if sample and sample.audit.step == steps - 1]
    samples, weights = [sample for sample, _ in taken], [block for _, block in taken]
    plan = samples[0].audit
    assert [sample.rank for sample in samples] == sorted({*plan.ranks, *plan.sources})
    by_rank = {sample.rank: sample for sample in samples}
    expected = [by_rank[rank].traces for rank in plan.ranks]
    return expected, pool.call(audit, plan.layout.world_size, spec, samples, weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spares_compute_the_same_bits_as_the_ranks(pool: WarmPool, layout: str) -> None:
    """Of whole gradients, in a unit of their own without ZeRO and replicas."""
    expected, computed = run_audit(pool, LAYOUTS[layout])
    assert computed == expected
    labels = [label for of_rank in expected for trace in of_rank for kind, label, _ in trace if kind == "contributed"]
    assert "loss" in labels and any(label.startswith("gradient of ") for label in labels)


@pytest.mark.parametrize(
    "words",
    [
        ["train.dtype=bf16", "train.weight_copies=true"],
        ["data.packing=documents"],
        ["train.loss_chunks=3", "lora.rank=2"],
        ["parallel.zero=3", "parallel.tile_mib=0.001", "cluster.workers=3"],
        ["parallel.zero=3", "parallel.quantize=weights"],
        ["parallel.zero=3", "train.dtype=float8", "cluster.workers=3"],
        ["parallel.zero=1", "train.dtype=bf16", "parallel.dp_replicate=2", "cluster.workers=8"],
        ["parallel.activation_offload=cpu", "parallel.activation_checkpointing=selective", "parallel.offload=cpu"],
        ["train.compile=true", "parallel.tp=2", "cluster.workers=4"],
        ["model.tie_embeddings=true", "parallel.pp=2", "cluster.workers=4"],
    ],
    ids=" ".join,
)
def test_spares_compute_the_same_bits_with_other_features(pool: WarmPool, words: list[str]) -> None:
    expected, computed = run_audit(pool, [*LLAMA, "cluster.workers=2", *words])
    assert computed == expected


@pytest.mark.parametrize("build", [build_normalized_bigram, custom_module.build])
def test_spares_compute_modules_of_users(pool: WarmPool, build: Any) -> None:
    """Running statistics are part of what they get."""
    custom = CustomModel(build, custom_module.loss)
    expected, computed = run_audit(pool, ["cluster.workers=3", "model.dropout=0"], steps=3, custom=custom)
    assert computed == expected
