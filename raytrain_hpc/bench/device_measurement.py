"""Speed, memory, kernels, power and clock of one process on one device, of the platform and of its peers."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from raytrain_hpc.bench.contenders import (
    build_baseline_command,
    check_first_losses,
    read_jsonl,
    run_process,
    scratch_dir,
)
from raytrain_hpc.bench.local_trainer import open_trainer
from raytrain_hpc.bench.step_profile import profile_step
from raytrain_hpc.bench.telemetry import Telemetry, sample_telemetry
from raytrain_hpc.bench.torch_baseline import DEVICE_FILE
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.observability.kernel_summary import KernelSummary
from raytrain_hpc.observability.metrics import compute_mfu
from raytrain_hpc.observability.peak_flops import get_peak_tflops
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.torch_device import get_device_module, get_peak_memory_gib, is_accelerator, synchronize

WARMUP_STEPS = 5


@dataclass(frozen=True)
class Measurement:
    """Medians over the steps after the warm-up, and the kernels of one more step.

    `peak_gib`: allocated by torch on a GPU, else resident memory of the process. `losses`: of all timed steps.
    `data_percent`: share of a step spent waiting for data; None: not measured.
    """

    tokens_per_sec: float
    peak_gib: float
    losses: list[float]
    kernels: KernelSummary
    telemetry: Telemetry
    data_percent: float | None = None


def measure_platform(config: Config, device: torch.device, *, warmup: int = WARMUP_STEPS) -> Measurement:
    """Train train.steps - 1 steps with the platform's trainer in this process, and profile the last one."""
    seconds, waits, losses = [], [], []
    with open_trainer(config, device) as trainer:

        def run_steps(steps: range) -> None:
            for step in steps:
                if step == 1 and is_accelerator(device):  # exclude memory used by compilation and autotuning
                    get_device_module(device).reset_peak_memory_stats(device)
                start = time.perf_counter()
                result = trainer.train_step(step)
                synchronize(device)
                seconds.append(time.perf_counter() - start)
                waits.append(result.data_s / seconds[-1])
                losses.append(result.loss)

        run_steps(range(warmup))
        with sample_telemetry(device) as telemetry:
            run_steps(range(warmup, config.train.steps - 1))
        peak_gib = get_peak_memory_gib(device)
        kernels = profile_step(lambda: trainer.train_step(config.train.steps - 1), device)
    rate = config.train.global_batch_size * config.train.seq_len / median(seconds[warmup:])
    return Measurement(rate, peak_gib, losses, kernels, telemetry, 100 * median(waits[warmup:]))


def measure_peer(
    config: Config, peer: str, platform: Measurement | None = None, *, warmup: int = WARMUP_STEPS
) -> Measurement:
    """Train a peer on the same tokens, from the same weights, for as many steps in a process of its own.

    `platform`: measured with the same config; the losses of its first step and of the peer's must agree.

    Raises:
        RunFailedError: The peer failed, or its first loss is another.
    """
    with scratch_dir() as directory:
        job = build_baseline_job(config, 1, directory, peer)
        job = replace(job, steps=config.train.steps - 1, measures_device=True)
        steps = directory / "steps.jsonl"
        run_process(build_baseline_command(job, 1, directory, steps), {"OMP_NUM_THREADS": str(job.threads)})
        records = read_jsonl(steps)
        facts = json.loads((directory / DEVICE_FILE).read_text())
    losses = [line["loss"] for line in records]
    if platform is not None:
        check_first_losses(peer, losses, platform.losses, config.train.dtype)
    end_times = [line["unix"] for line in records[warmup - 1 :]]
    seconds = median(later - earlier for earlier, later in zip(end_times, end_times[1:], strict=False))
    return Measurement(
        config.train.global_batch_size * config.train.seq_len / seconds,
        facts["peak_gib"],
        losses,
        KernelSummary.from_json(facts["kernels"]),
        Telemetry(**facts["telemetry"]),
    )


def compute_mfu_percent(
    config: Config, spec: ModelSpec, device_name: str, tokens_per_sec: float, *, causal: bool
) -> float | None:
    """Return the model FLOPs utilization in percent; None if the peak of the device is unknown.

    `causal`: count causal attention once; else the full square of scores, as PaLM and nanoGPT do.
    """
    peak = get_peak_tflops(device_name, config.train.dtype)
    flops = compute_flops_per_token(spec, config.train.seq_len, causal=causal)
    mfu = compute_mfu(tokens_per_sec, flops, 1, peak)
    return None if mfu is None else 100 * mfu
