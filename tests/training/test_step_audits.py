"""Audits of steps: no false alarm on any layout, and flipped bits found, attributed and undone."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain_hpc as rt
from examples import custom_module
from raytrain_hpc.errors import ConfigError, RunFailedError
from raytrain_hpc.parallel import pairwise_all_reduce
from raytrain_hpc.runtime.bit_flips import CallBitFlip
from raytrain_hpc.runtime.worker_spec import CustomModel, Script
from raytrain_hpc.training.train_module import DecoderTrainModule
from tests.training.elastic_runs import BASE, MODELS, RunOnce, get_bits, run_bits
from tests.training.normalized_bigram import build_normalized_bigram
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, prepare_run_on_cpu

AUDITED = "fault.audit_interval=1"
LLAMA, MOE = MODELS["llama"], MODELS["moe"]
LAYOUTS: dict[str, list[str]] = {
    "one rank": [*LLAMA, "cluster.workers=1"],
    "ddp-2": [*LLAMA, "cluster.workers=2", "parallel.bucket_mib=1"],
    "ddp-5": [*LLAMA, "cluster.workers=5"],  # ranks have one or two microbatches
    "zero1-2": [*LLAMA, "cluster.workers=2", "parallel.zero=1"],
    "zero2-3": [*LLAMA, "cluster.workers=3", "parallel.zero=2"],
    "zero3-4, recompute": [
        *(*LLAMA, "cluster.workers=4", "parallel.zero=3"),
        "parallel.activation_checkpointing=full",
    ],
    "hsdp-2x2": [*LLAMA, "cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
    "tp2 x ddp-2": [*LLAMA, "cluster.workers=4", "parallel.tp=2"],
    "ring2 x zero3-2": [*LLAMA, "cluster.workers=4", "parallel.cp=2", "parallel.zero=3"],
    "ulysses2 x ddp-2": [*LLAMA, "cluster.workers=4", "parallel.cp=2", "parallel.ulysses=2"],
    "pp2 x ddp-3": [*LLAMA, "cluster.workers=6", "parallel.pp=2"],
    "zbv x zero3-2": [
        *(*LLAMA, "cluster.workers=4", "parallel.pp=2", "parallel.zero=3"),
        *("parallel.pp_schedule=zbv", "model.num_layers=4"),
    ],
    "ep2": [*MOE, "cluster.workers=2", "parallel.ep=2", "model.load_balancing=bias"],
    "ep2 x ddp-2": [*MOE, "cluster.workers=4", "parallel.ep=2"],
    "ep2 x zero3-2": [*MOE, "cluster.workers=4", "parallel.ep=2", "parallel.zero=3"],
    "ep4 x cp2 x tp2": [*MOE, "cluster.workers=8", "parallel.ep=4", "parallel.cp=2", "parallel.tp=2"],
}


def run_steps(pool: WarmPool, run_dir: Path | None, *words: str) -> tuple[list[tuple[float, float]], list[Any]]:
    """Train; return loss and gradient norm of each step, and the incidents."""
    records = pool.train(make_small_config(run_dir, *BASE, *words))[0]
    steps = [(record["train/loss"], record["train/grad_norm"]) for record in get_step_metrics(records)]
    return steps, [record for record in records if record.get("type") == "incident"]


def make_fault(kind: str, rank: int, *, step: int = 2, bit: int = 22, more: str = "") -> str:
    return f"fault.inject=[{{kind: bitflip_{kind}, rank: {rank}, step: {step}, bit: {bit}{more}}}]"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_audited_run_has_the_same_bits_and_no_alarm(pool: WarmPool, layout: str) -> None:
    """With dropout, clipping and padding microbatches on some ranks."""
    steps, incidents = run_steps(pool, None, *LAYOUTS[layout], AUDITED)
    assert (steps, incidents) == (run_steps(pool, None, *LAYOUTS[layout])[0], [])


@pytest.mark.parametrize(
    "words",
    [
        ["train.dtype=bf16", "train.weight_copies=true"],
        ["data.packing=documents"],
        ["train.loss_chunks=3", "lora.rank=2"],
        ["parallel.zero=3", "parallel.tile_mib=0.001", "parallel.quantize=weights"],
        ["parallel.zero=3", "train.dtype=float8"],
        ["parallel.activation_offload=cpu", "parallel.activation_checkpointing=selective"],
        ["optimizer.name=muon", "parallel.zero=2", "cluster.workers=3"],
        ["optimizer.name=muon", "parallel.tp=2", "cluster.workers=4", "train.weight_copies=true", "train.dtype=bf16"],
        [
            "optimizer.moment_dtype=bf16",
            "optimizer.beta2=0.95",
            "parallel.zero=1",
            "parallel.offload=disk",
            "parallel.offload_dir=/tmp",
        ],
        ["optimizer.name=torch.optim.NAdam", "parallel.zero=3", "cluster.workers=3"],
        ["optimizer.name=sgd", "optimizer.groups=[{pattern: '*embedding*', lr_factor: 0}]", "parallel.zero=2"],
        ["train.compile=true", "parallel.tp=2", "cluster.workers=4"],
    ],
    ids=" ".join,
)
def test_audits_with_other_features(pool: WarmPool, words: list[str]) -> None:
    words = [*LLAMA, "cluster.workers=2", *words]
    steps, incidents = run_steps(pool, None, *words, AUDITED)
    assert (steps, incidents) == (run_steps(pool, None, *words)[0], [])


@pytest.mark.parametrize("build", [build_normalized_bigram, custom_module.build])
def test_modules_of_users_have_the_same_bits_with_audits(pool: WarmPool, tmp_path: Path, build: Any) -> None:
    """Running statistics are those without audits."""
    custom, words = CustomModel(build, custom_module.loss), ["cluster.workers=3", "model.dropout=0"]
    bits = [
        run_bits(pool, tmp_path / interval, *words, f"fault.audit_interval={interval}", custom=custom)
        for interval in ("0", "2")
    ]
    assert bits[0] == bits[1]


ALL_BITS = [0, 11, 31]  # the last bit of the mantissa, one in its middle, the sign
SEVERAL_RANKS = [layout for layout in LAYOUTS if layout not in ("one rank", "ep4 x cp2 x tp2")]
SMALL_BATCH = {  # one microbatch per data-parallel rank; for others: 6
    "ddp-5": 2,
    "zero2-3": 4,
    "zero3-4, recompute": 3,
    "hsdp-2x2": 3,
    "pp2 x ddp-3": 4,
    "ep2 x ddp-2": 3,
    "ep2 x zero3-2": 3,
}


# Rank 1 is in the middle of each layout: a tensor- or context-parallel peer, a second stage, or an owner of experts.
@pytest.mark.parametrize("bit", [11, 22, 31])
@pytest.mark.parametrize("kind", ["batch", "activation", "gradient"])
@pytest.mark.parametrize("layout", SEVERAL_RANKS)
def test_a_transient_fault_is_named_and_undone(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str, kind: str, bit: int
) -> None:
    """The first microbatch of rank 1 is hit, which has no other."""
    words = [*LAYOUTS[layout], f"train.micro_batch_size={SMALL_BATCH.get(layout, 6)}", "train.steps=4"]
    expected = run_once(*words)
    # Token numbers have few bits. Of two vocabulary-parallel ranks, the one with its embedding notices a token.
    rank, bit = (0 if (kind, layout) == ("batch", "tp2 x ddp-2") else 1), (bit % 5 if kind == "batch" else bit)
    fault = make_fault(kind, rank, bit=bit)
    records = pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED, fault))[0]
    assert get_bits(records, tmp_path) == expected
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert (incident["kind"], incident["rank"]) == ("silent corruption", rank)
    assert incident["operation"] == "audit of step 2" and incident["steps_lost"] == 0
    assert "right when repeated" in incident["reason"]
    assert incident["recovered_s"] > 0


# What is found in which phase of a step, and how the fault is told apart. Any bit changes what is compared.
PHASES = {
    "message": "rank 1 received (the sum of gradients|microbatch [0-5]) wrong",
    "sum": "rank 1 computed the sum of gradients wrong",
    "reduced": "rank 1 kept reduced gradients wrong",
    "update": "rank 1 computed the update wrong .weight of",
}


@pytest.mark.parametrize("bit", ALL_BITS)
@pytest.mark.parametrize("kind", PHASES)
@pytest.mark.parametrize("layout", SEVERAL_RANKS)
def test_a_transient_fault_after_the_passes_is_named_and_undone(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str, kind: str, bit: int
) -> None:
    """The state after the last step is that of a run without the fault, on another rank's microbatches too."""
    words = [*LAYOUTS[layout], f"train.micro_batch_size={SMALL_BATCH.get(layout, 6)}", "train.steps=4"]
    expected = run_once(*words)
    fault = make_fault(kind, 1, step=3, bit=bit)
    records = pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED, fault))[0]
    assert get_bits(records, tmp_path) == expected
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert (incident["rank"], incident["operation"]) == (1, "audit of step 3")
    assert re.match(PHASES[kind], incident["reason"]), incident["reason"]
    assert incident["reason"].endswith("right when repeated")


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("layout", ["ddp-5", "ddp-2", "tp2 x ddp-2"])
def test_copies_of_gradients_that_differ_are_found(pool: WarmPool, layout: str, is_persistent: bool) -> None:
    """One rank gets a wrong sum from the all-gather of slices: once, or again and again."""
    words = [*LAYOUTS[layout], f"train.micro_batch_size={SMALL_BATCH.get(layout, 6)}", "train.steps=3"]
    config = make_small_config(None, *BASE, *words, "eval.interval=0", AUDITED)
    callbacks = (WrongAllGather(is_persistent),)
    if is_persistent:
        first = 0 if layout == "ddp-2" else 1  # of those that hold the same
        with pytest.raises(RankFailedError, match=f"audit of step 2: rank {first} received gradients wrong"):
            pool.train(config, callbacks=callbacks)
        return
    records = pool.train(config, callbacks=callbacks)[0]
    steps = [(record["train/loss"], record["train/grad_norm"]) for record in get_step_metrics(records)]
    assert steps == run_steps(pool, None, *words, "eval.interval=0")[0]
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert re.match(r"rank 1 received gradients wrong \(reduced gradient of .*right when repeated", incident["reason"])


class WrongAllGather(rt.Callback):
    """A bit flip in what rank 1 receives in the first all-gather of gradients of step 2; persistent: of all."""

    def __init__(self, is_persistent: bool):
        self._is_persistent = is_persistent
        self._flip: CallBitFlip | None = None

    def pre_step(self) -> None:  # called again when the passes are repeated
        if self.context.rank == 1 and self.context.step == 1 and self._flip is None:
            self._flip = CallBitFlip(pairwise_all_reduce, "all_gather_flat", 3, is_persistent=self._is_persistent)
            self._flip.attach()

    def close(self) -> None:
        if self._flip is not None:
            self._flip.detach()


@pytest.mark.parametrize(
    ("layout", "kind", "named"),
    [
        ("zero2-3", "sum", "rank 1 computed the sum of gradients"),
        ("zero3-4, recompute", "message", "rank 1 received the sum of gradients"),
        ("zero2-3", "update", "rank 1 computed the update"),
        ("ddp-5", "update", "rank 1 computed the update"),
        ("hsdp-2x2", "reduced", "rank 1 kept reduced gradients"),
    ],
)
def test_a_persistent_fault_after_the_passes_is_named(
    pool: WarmPool, tmp_path: Path, layout: str, kind: str, named: str
) -> None:
    fault = make_fault(kind, 1, more=", persistent: true")
    words = [*LAYOUTS[layout], f"train.micro_batch_size={SMALL_BATCH[layout]}"]
    with pytest.raises(RankFailedError, match=f"AuditMismatchError: audit of step 2: {named} wrong[^;]*again when"):
        pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED, fault))


@pytest.mark.parametrize("layout", ["ddp-5", "zero3-4, recompute", "tp2 x ddp-2", "pp2 x ddp-3", "ep2 x zero3-2"])
def test_a_matrix_that_is_orthogonalized_wrong_is_named(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str
) -> None:
    small = [f"train.micro_batch_size={SMALL_BATCH.get(layout, 6)}", "train.steps=4"]
    words = [*LAYOUTS[layout], *small, "optimizer.name=muon"]
    expected = run_once(*words)
    words = [*words, AUDITED, make_fault("update", 1, step=3, bit=0)]
    records = pool.train(make_small_config(tmp_path, *BASE, *words))[0]
    assert get_bits(records, tmp_path) == expected
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert incident["rank"] == 1 and incident["reason"].startswith("rank 1 computed orthogonal matrices wrong (optim")


def test_a_step_that_is_not_finite_is_no_mismatch(pool: WarmPool) -> None:
    words = [*LAYOUTS["zero2-3"], "fault.on_nan=skip", "fault.max_failures=9", "optimizer.lr=1e30", "eval.interval=0"]
    steps, incidents = run_steps(pool, None, *words, AUDITED)
    expected, _ = run_steps(pool, None, *words)
    assert str(steps) == str(expected) and "inf" in str(steps)
    assert {incident["kind"] for incident in incidents} == {"not finite"}


@pytest.mark.parametrize("bit", [0, 6, 12, 22, 23, 30, 31])
@pytest.mark.parametrize("kind", ["activation", "gradient"])
def test_flips_that_change_a_result_are_found(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, kind: str, bit: int
) -> None:
    """Whether one does, an unaudited run with the flip tells, unless it repeats a step that is not finite."""
    small = ["train.micro_batch_size=6", "train.steps=4"]
    words, fault = [*LLAMA, "cluster.workers=2", *small], make_fault(kind, 1, bit=bit)
    expected = run_once(*words)
    unaudited = run_bits(pool, tmp_path / "unaudited", *words, fault)
    steps, incidents = run_steps(pool, tmp_path / "audited", *words, AUDITED, fault)
    assert steps == [step[:2] for step in expected[0]]
    assert unaudited != expected or bit < 12 or bit == 30
    if unaudited != expected or bit == 30:
        assert [incident["rank"] for incident in incidents] == [1]


@pytest.mark.parametrize(
    ("layout", "rank", "named"),
    [
        ("ddp-5", 3, "rank 3 computed"),
        ("zero2-3", 1, "rank 1 computed"),
        ("pp2 x ddp-3", 1, "rank 1 computed"),  # the second stage of the first pipeline
        ("ddp-2", 1, "rank 0 computed .* or those that it was compared with.*rank 1 computed"),
    ],
)
def test_a_persistent_fault_ends_the_generation_with_the_rank_named(
    pool: WarmPool, tmp_path: Path, layout: str, rank: int, named: str
) -> None:
    """Of two ranks that disagree, both are named: no third one can decide. The driver does, later."""
    fault = make_fault("activation", rank, more=", persistent: true")
    with pytest.raises(RankFailedError, match=rf"AuditMismatchError: audit of step [23]: {named}.*again when repeated"):
        pool.train(make_small_config(tmp_path, *BASE, *LAYOUTS[layout], AUDITED, fault))


def test_audits_of_a_script_are_refused(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "train.deterministic=elastic", "fault.audit_interval=auto")
    with pytest.raises(ConfigError, match="fault.audit_interval='auto'.*the body of a script's loop.*set it to 0"):
        prepare_run_on_cpu(config, Script("train.py"))


def test_audits_need_fixed_bits() -> None:
    with pytest.raises(ConfigError, match=r"fault.audit_interval=10.*needs train.deterministic=elastic"):
        make_small_config(None, "fault.audit_interval=10")


@pytest.mark.parametrize(
    ("num_right", "error", "message"),
    [
        (2, RunFailedError, "audit of step 1: rank 0 computed .* again when repeated; use another"),
        (0, ConfigError, "audit_interval=1.*two computations of a microbatch have different bits on all"),
    ],
)
def test_a_run_in_this_process_ends_if_it_computes_wrong_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_right: int, error: type[Exception], message: str
) -> None:
    """Its own audits find errors that differ each time; if there are some from the start, the model is to blame."""
    numbers = itertools.count()

    def add_noise(*arguments: Any) -> Any:
        loss, count = original(*arguments)
        return loss * (1 + 1e-3 * max(0, next(numbers) - num_right)), count

    original = DecoderTrainModule.loss
    monkeypatch.setattr(DecoderTrainModule, "loss", add_noise)
    config = make_small_config(tmp_path, *BASE, *LLAMA, "cluster.workers=0", AUDITED)
    with pytest.raises(error, match=message):
        rt.train(config, quiet=True)


def test_a_run_in_this_process_goes_back_to_a_checkpoint_from_before_the_last_audit(tmp_path: Path) -> None:
    words = [*BASE, *LLAMA, "cluster.workers=0", "train.steps=12", "eval.interval=0", "checkpoint.interval=3"]
    rt.train(make_small_config(tmp_path / "clean", *words), quiet=True)
    faults = "fault.inject=[{kind: bitflip_moment, rank: 0, step: 8, bit: 4}]"
    words += ["fault.audit_interval=4", "checkpoint.keep=1"]
    result = rt.train(make_small_config(tmp_path / "fault", *words, faults), quiet=True)
    assert (result.outcome, result.restarts) == ("done", 1)
    assert read_losses(tmp_path / "fault") == read_losses(tmp_path / "clean")
    (incident,) = [json.loads(line) for line in (tmp_path / "fault" / "incidents.jsonl").read_text().splitlines()]
    assert (incident["kind"], incident["rank"]) == ("corrupt", 0) and "has changed since step 7" in incident["reason"]
    untrusted = json.loads((tmp_path / "fault" / "checkpoints" / "untrusted.json").read_text())
    assert [entry["after_step"] for entry in untrusted] == [4]


def read_losses(run_dir: Path) -> dict[int, float]:
    """Return the loss of each step, the last one if it was repeated."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines}


def build_noisy_bigram(config: rt.Config) -> torch.nn.Module:
    module = custom_module.build(config)
    module.register_forward_hook(lambda module, inputs, output: output * (1 + time.perf_counter() % 1))
    return module


def test_a_model_that_is_not_deterministic_is_refused(pool: WarmPool) -> None:
    config = make_small_config(None, *BASE, "cluster.workers=2", "model.dropout=0", AUDITED)
    with pytest.raises(RankFailedError, match="ConfigError: fault.audit_interval=1.*not deterministic from the model"):
        pool.train(config, custom=CustomModel(build_noisy_bigram, custom_module.loss))
