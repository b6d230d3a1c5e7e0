"""Audits by spares: they compute a microbatch of a running generation again, in processes of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from examples import custom_module
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.runtime.audit_sample import AuditSample, SampleStore
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.spare_audit import AuditCancelledError, compute_again
from tests.data.samples import image_task, stream_task
from tests.data.samples.test_streams import make_images
from tests.parallel.compiled_run import trace_only
from tests.training.elastic_runs import BASE, MODELS
from tests.training.normalized_bigram import build_normalized_bigram
from tests.training.test_step_audits import LAYOUTS
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

CPU = torch.device("cpu")
LLAMA = MODELS["llama"]
SAMPLED = ["cluster.spares=1", "fault.audit_interval=1000", "fault.spare_audit_interval=1"]


def train_with_samples(rank: int, rendezvous: Any, spec: Any) -> tuple[Any, Any, list[float]]:
    """Train to the end of the spec, and return the sample of the disputed step, its weights, and the losses."""
    control = ControlChannel()
    with trace_only():
        build_trainer(spec, rank, CPU, rendezvous, control).run(spec.start_step, spec.end_step)
    steps = get_step_metrics(control.drain())
    return *control.samples.take(), [metrics["train/loss"] for metrics in steps]


def audit(rank: int, rendezvous: Any, spec: Any, samples: list[AuditSample], weights: list[Any]) -> Any:
    """Compute what the samples have computed as one of the spares."""
    by_source = [(sample.index, block) for sample, block in zip(samples, weights, strict=True) if block is not None]
    plan = samples[0].audit
    batch = next(sample for sample in samples if sample.rank == plan.ranks[rank]).batch
    with trace_only():
        return compute_again(spec, plan, rank, CPU, rendezvous, by_source, batch)


def run_audit(
    pool: WarmPool, words: list[str], *, steps: int = 2, custom: Any = None, function: Any = audit
) -> tuple[Any, Any]:
    """Train and audit the last step; return the traces of the audited ranks, and those of the spares.

    `function`: what the spares call; they return what it does.
    """
    config = make_small_config(None, *BASE, *words, *SAMPLED)
    spec = make_worker_spec(config, int(config.cluster.workers), steps_to=steps, custom=custom)
    spec = replace(spec, disputed_step=steps - 1)
    results = pool.call(train_with_samples, spec.layout.world_size, spec)
    taken = [(sample, weights) for sample, weights, _ in results if sample and sample.audit.step == steps - 1]
    samples, weights = [sample for sample, _ in taken], [block for _, block in taken]
    plan = samples[0].audit
    assert [sample.rank for sample in samples] == sorted({*plan.ranks, *plan.sources})
    by_rank = {sample.rank: sample for sample in samples}
    expected = [by_rank[rank].traces for rank in plan.ranks]
    return expected, pool.call(function, plan.layout.world_size, spec, samples, weights)


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
        ["parallel.zero=3", "parallel.tile_mib=0.01", "cluster.workers=3"],
        ["parallel.zero=3", "parallel.quantize=weights"],
        ["parallel.zero=3", "train.dtype=float8", "cluster.workers=3"],
        ["parallel.zero=1", "train.dtype=bf16", "parallel.dp_replicate=2", "cluster.workers=6"],
        ["parallel.activation_offload=cpu", "parallel.activation_checkpointing=selective", "parallel.offload=cpu"],
        ["train.compile=true", "model.num_layers=1"],
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


@pytest.mark.parametrize("make_dataset", [stream_task.PlainStream, lambda: stream_task.deal_images, image_task.Images])
def test_spares_get_batches_that_they_cannot_read(pool: WarmPool, make_dataset: Any) -> None:
    """Streams have one position, which belongs to the ranks."""
    words = ["cluster.workers=2", "parallel.zero=2", "model.dropout=0"]
    expected, computed = run_audit(pool, words, custom=make_images(make_dataset()))
    assert computed == expected


def cancel(rank: int, rendezvous: Any, spec: Any, num_checks: int) -> list[str]:
    """Audit on two spares of which the first is cancelled at its n-th check; return how it ends."""
    layout, checks = Layout(tp=2), iter(range(10))
    plan = SpareAudit(0, layout, (0, 1), (0,), (0,))
    try:
        is_cancelled = (lambda: next(checks) >= num_checks) if rank == 0 else (lambda: False)
        compute_again(replace(spec, layout=layout), plan, rank, CPU, rendezvous, [], b"", is_cancelled)
    except AuditCancelledError:
        return ["cancelled"]
    return ["computed"]


def test_spares_of_an_audit_are_cancelled_together(pool: WarmPool) -> None:
    config = make_small_config(None, *BASE, *LLAMA, "cluster.workers=4", "parallel.tp=2", *SAMPLED)
    spec = make_worker_spec(config, 4, steps_to=2)
    assert pool.call(cancel, 2, spec, 1) == [["cancelled"]] * 2


class WatchedBlock:
    """A block of weights that notes whether the next sample may begin while it is copied."""

    def __init__(self, store: SampleStore):
        self._store, self.can_begin = store, True

    def copy(self) -> WatchedBlock:
        self.can_begin = self._store.is_wanted(9)
        return self


def test_a_sample_is_kept_until_it_is_cleared_and_not_overwritten_meanwhile() -> None:
    store, plan = SampleStore(), SpareAudit(4, Layout(), (0,), (0,), (0,))
    store.clear(next_step=4)
    assert not store.is_wanted(3) and store.is_wanted(4) and store.take() == (None, None)
    block: Any = WatchedBlock(store)
    store.put(AuditSample(plan, 1, 0, index={}), block)
    assert not store.is_wanted(5) and block.can_begin
    sample, taken = store.take()
    assert sample is not None and sample.audit is plan and taken is block and not block.can_begin
    assert not store.is_wanted(9)
    store.clear(next_step=8)
    assert not store.is_wanted(7) and store.is_wanted(8) and store.take() == (None, None)
