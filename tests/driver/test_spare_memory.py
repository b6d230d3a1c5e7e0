"""Memory of audits by spares: the estimate against what a spare allocates, and the line about devices that lack it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.auto_layout import estimate_run
from raytrain_hpc.driver.run_banner import announce_run
from raytrain_hpc.driver.run_setup import PreparedRun, prepare_run
from raytrain_hpc.driver.spare_memory import estimate_spare_footprint, explain_too_large_audits
from raytrain_hpc.planner.hardware import DEVICES, make_machine
from raytrain_hpc.runtime.audit_sample import AuditSample
from tests.parallel.test_peak_memory import FAMILIES, SIZES, PeakTracker
from tests.training.elastic_runs import BASE
from tests.training.test_spare_audits import SAMPLED, audit, run_audit
from tests.warm_pool import WarmPool, make_small_config

LONG = ["train.seq_len=256", "model.dropout=0"]  # activations are larger than what hashing takes, half a MiB
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "tp2 x ddp-2": ["cluster.workers=4", "parallel.tp=2"],
    "pp2 x ddp-2": ["cluster.workers=4", "parallel.pp=2"],
}


def measure_audit(rank: int, rendezvous: Any, spec: Any, samples: list[AuditSample], weights: Sequence[Any]) -> int:
    """Audit as one of the spares, and return the peak of allocated bytes."""
    with PeakTracker() as tracker:
        audit(rank, rendezvous, spec, samples, list(weights))
    return tracker.peak


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spare_allocates_what_is_estimated(pool: WarmPool, layout: str) -> None:
    words = [*SIZES, *LONG, *FAMILIES["llama"], *LAYOUTS[layout]]
    _, peaks = run_audit(pool, words, function=measure_audit)
    config = make_small_config(None, *BASE, *words, *SAMPLED)
    prepared = prepare_run(config, None, print)
    resolved, batching = prepared.resolve_layout(int(config.cluster.workers))
    planned = estimate_spare_footprint(config, prepared.model_spec, resolved, batching)
    # More with tensor parallelism, where what ranks exchange is hashed too.
    assert 0.95 * planned.allocated < max(peaks) < 1.15 * planned.allocated


def prepare_70b(*words: str) -> PreparedRun:
    base = ["cluster.workers=64", "cluster.spares=8", "train.deterministic=elastic", "fault.audit_interval=100"]
    model = ["model.preset=llama3_70b", "data.path=synthetic", "train.seq_len=4096", "train.global_batch_size=64"]
    more = ["train.micro_batch_size=1", "train.dtype=bf16", "parallel.zero=3"]
    config = load_config(None, [*base, *model, *more, "parallel.activation_checkpointing=full", *words])
    return prepare_run(config, None, print)


def test_a_device_without_the_memory_is_named() -> None:
    """A 70B model that is sharded over 64 GPUs: a spare has all of it, and each of eight an eighth."""

    def explain(*words: str) -> str | None:
        prepared = prepare_70b(*words)
        layout, batching = prepared.resolve_layout(64)
        return explain_too_large_audits(prepared.config, prepared.model_spec, layout, batching, DEVICES["h100"])

    message = explain()
    assert message is not None and "a spare needs" in message and "and the device has 79" in message
    weights_gib = 70.55e9 * (4 + 4) / 2**30  # with gradients, in fp32
    assert weights_gib < float(re.findall(r"about (\d+) GiB", message)[0]) < 1.5 * weights_gib
    assert explain("fault.spare_audit_interval=0") is None
    assert explain("parallel.tp=8") is None


@pytest.mark.parametrize(("device", "is_named"), [("h100", True), ("cpu", False)])
def test_the_summary_of_a_run_names_it(device: str, is_named: bool) -> None:
    """The memory of CPU workers is not known."""
    prepared, machine = prepare_70b(), make_machine(device, 8, 8)
    layout, batching = prepared.resolve_layout(64)
    lines: list[str] = []
    estimate = estimate_run(prepared, layout, batching, machine)
    announce_run(prepared, layout, batching, machine, estimate, lines.append)
    assert any(line.startswith("spares  audits by spares may run out of memory") for line in lines) == is_named
