"""`bench device`: speed and memory on one accelerator, compared with the plan and with PyTorch baselines."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from raytrain_hpc.bench.contenders import build_baseline_command, log_progress, read_jsonl, run_process, scratch_dir
from raytrain_hpc.bench.local_trainer import open_trainer, release_memory, require_gpu
from raytrain_hpc.bench.results_table import Table, Value
from raytrain_hpc.bench.workloads import COMMON_OVERRIDES, build_baseline_job
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.observability.metrics import compute_mfu
from raytrain_hpc.observability.peak_flops import get_peak_tflops
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.planner.hardware import find_device_preset, make_machine
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout
from raytrain_hpc.planner.search import Estimate, estimate_layout

MEMORY_GOAL = 5.0  # percent between planned and measured memory
WARMUP_STEPS = 5
STEPS_PER_ROUND = 15

BASE_OVERRIDES = (*COMMON_OVERRIDES, "data.path=synthetic", "cluster.workers=0", "cluster.device=cuda")
LLAMA = ("model.preset=llama3_1b", "train.seq_len=4096", "train.global_batch_size=8", "train.micro_batch_size=4")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.global_batch_size=32", "train.micro_batch_size=16")
FP32, BF16 = ("train.dtype=fp32",), ("train.dtype=bf16",)
BF16_COMPILED = (*BF16, "train.compile=true")
NO_RECOMPUTE, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE = (
    (f"parallel.activation_checkpointing={mode}",) for mode in ("none", "selective", "full")
)


@dataclass(frozen=True)
class Case:
    """A model and its settings. `with_baselines`: also measure a plain PyTorch loop and transformers."""

    name: str
    overrides: tuple[str, ...]
    with_baselines: bool = False


CASES = (
    Case("llama3_1b, compiled", (*LLAMA, *BF16_COMPILED, *NO_RECOMPUTE), with_baselines=True),
    Case("llama3_1b, compiled", (*LLAMA, *BF16_COMPILED, *NO_RECOMPUTE, "train.micro_batch_size=8")),
    Case("llama3_1b, compiled", (*LLAMA, *BF16_COMPILED, *SELECTIVE_RECOMPUTE)),
    Case("llama3_1b, compiled", (*LLAMA, *BF16_COMPILED, *FULL_RECOMPUTE)),
    Case("llama3_1b", (*LLAMA, *BF16, *NO_RECOMPUTE, "train.micro_batch_size=2")),
    Case("llama3_1b", (*LLAMA, *BF16, *SELECTIVE_RECOMPUTE, "train.micro_batch_size=2")),
    Case("gpt2_124m, compiled", (*GPT2, *BF16_COMPILED, *NO_RECOMPUTE)),
    Case("gpt2_124m, compiled", (*GPT2, *BF16_COMPILED, *SELECTIVE_RECOMPUTE)),
    Case("gpt2_124m", (*GPT2, *BF16, *NO_RECOMPUTE)),
    Case("gpt2_124m", (*GPT2, *FP32, *NO_RECOMPUTE, "train.micro_batch_size=8")),
    Case("gpt2_124m", (*GPT2, *FP32, *FULL_RECOMPUTE, "train.micro_batch_size=8")),
)


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps after the warm-up. `data_percent`: share of a step spent waiting for data."""

    tokens_per_sec: float
    peak_gib: float
    data_percent: float | None = None


def run(rounds: int) -> Table:
    """Measure every case once, with a number of steps proportional to `rounds`.

    Raises:
        ClusterError: This machine has no usable GPU.
    """
    device = require_gpu("device")
    device_name = torch.cuda.get_device_name(device)
    table = Table(
        "bench device: one process on one accelerator",
        (
            "model",
            "by",
            "microbatch",
            "activation checkpointing",
            "dtype",
            "tok/s",
            "MFU %",
            "expected tok/s",
            "waiting for data %",
        )
        + ("peak GiB", "planned GiB", "off by %", "met"),
        notes=[device_name],
    )
    for case in CASES:
        _measure(case, WARMUP_STEPS + STEPS_PER_ROUND * rounds, device, table)
    table.notes += [
        "tok/s: median step after five; MFU counts 6N + 6Lhs, causal counted once, of the dense bf16 peak",
        "peak: memory allocated by torch's allocator; planned: the same by `plan`, without fragmentation",
        "plain: a PyTorch loop that compiles model and loss together, with fused AdamW and autocast; transformers: its "
        "Llama in the same loop; goals: 50 % MFU in the first row, planned memory within 5 %",
    ]
    return table


def _measure(case: Case, steps: int, device: torch.device, table: Table) -> None:
    device_name = torch.cuda.get_device_name(device)
    overrides = [*BASE_OVERRIDES, *case.overrides, f"train.steps={steps}"]
    config = load_config(None, overrides)
    model_spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    plan = predict(config, model_spec, device_name)
    platform = measure_platform(config, device)
    release_memory()
    planned_gib = plan.footprint.allocated / 2**30
    error_percent = 100 * (planned_gib / platform.peak_gib - 1)
    rate = config.train.global_batch_size * config.train.seq_len / plan.step_s
    remaining: list[Value] = [
        rate,
        platform.data_percent,
        platform.peak_gib,
        planned_gib,
        error_percent,
        abs(error_percent) <= MEMORY_GOAL,
    ]
    _add_row(
        table,
        case,
        config,
        "the platform",
        platform,
        _compute_mfu(config, model_spec, device_name, platform),
        remaining,
    )
    for peer, kind in (("plain", "decoder"), ("transformers", "transformers")) if case.with_baselines else ():
        if kind == "transformers" and importlib.util.find_spec("transformers") is None:
            continue
        baseline = measure_baseline(config, kind)
        _add_row(
            table,
            case,
            config,
            peer,
            baseline,
            _compute_mfu(config, model_spec, device_name, baseline),
            [None, None, baseline.peak_gib],
        )


def _add_row(
    table: Table,
    case: Case,
    config: Config,
    system: str,
    measurement: Measurement,
    mfu_percent: float | None,
    remaining: list[Value],
) -> None:
    log_progress(f"{case.name} by {system}: {measurement.tokens_per_sec:.0f} tok/s, {measurement.peak_gib:.2f} GiB")
    settings: list[Value] = [
        config.train.micro_batch_size,
        config.parallel.activation_checkpointing,
        config.train.dtype,
    ]
    row = [case.name, system, *settings, measurement.tokens_per_sec, mfu_percent, *remaining]
    table.add_row(*row, *[None] * (len(table.columns) - len(row)))


def _compute_mfu(config: Config, model_spec: ModelSpec, device: str, measurement: Measurement) -> float | None:
    peak = get_peak_tflops(device, config.train.dtype)
    mfu = compute_mfu(measurement.tokens_per_sec, compute_flops_per_token(model_spec, config.train.seq_len), 1, peak)
    return None if mfu is None else 100 * mfu


def predict(config: Config, model_spec: ModelSpec, device: str) -> Estimate:
    """Estimate speed and memory on one device of this name, with the default calibration."""
    machine = make_machine(find_device_preset(device) or "h100", 1, 1)
    layout = resolve_layout(config, 1)
    return estimate_layout(config, model_spec, machine, Calibration(), layout, resolve_batching(config, layout))


def measure_platform(config: Config, device: torch.device) -> Measurement:
    """Train with the platform's trainer in this process."""
    seconds, waits = [], []
    with open_trainer(config, device) as trainer:
        for step in range(config.train.steps):
            if step == 1:  # exclude memory used by compilation and autotuning
                torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            result = trainer.train_step(step)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
            waits.append(result.data_s / seconds[-1])
        peak = torch.cuda.max_memory_allocated(device) / 2**30
    rate = config.train.global_batch_size * config.train.seq_len / median(seconds[WARMUP_STEPS:])
    return Measurement(rate, peak, 100 * median(waits[WARMUP_STEPS:]))


def measure_baseline(config: Config, model_kind: str) -> Measurement:
    """Train with the PyTorch baseline on the same tokens."""
    with scratch_dir() as directory:
        job = replace(build_baseline_job(config, 1, directory), model=model_kind)
        steps = directory / "steps.jsonl"
        run_process(build_baseline_command(job, 1, directory, steps), {"OMP_NUM_THREADS": str(job.threads)})
        records = read_jsonl(steps)
    end_times = [line["unix"] for line in records[WARMUP_STEPS - 1 :]]
    seconds = median(later - earlier for earlier, later in zip(end_times, end_times[1:], strict=False))
    return Measurement(config.train.global_batch_size * config.train.seq_len / seconds, records[-1]["peak_gib"])
