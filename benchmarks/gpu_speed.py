"""Measure training speed on one GPU, technique by technique: `python benchmarks/gpu_speed.py --out FILE`.

Each row runs in a process of its own, so that running out of memory ends one row only. Results are appended to FILE as
JSON lines, and rows that it has already are skipped; `--rows PATTERN` selects rows. `--dry-run` runs every row on a CPU
with a tiny model, to test this script. Needs no Ray.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

WARMUP_STEPS, STEPS, PROFILED_STEPS = 6, 30, 2
COMMON = (
    *("data.path=synthetic", "cluster.workers=0", "eval.samples=1", "lr_scheduler.warmup_steps=0"),
    "train.dtype=bf16",
)
LLAMA_1B = ("model.preset=llama3_1b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=16")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.compile=true", "train.global_batch_size=64")
LLAMA_8B = ("model.preset=llama3_8b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=1")
MOE_1B = (
    *("model.hidden_size=1024", "model.num_layers=16", "model.num_heads=16", "model.ffn_size=704"),
    *("model.num_experts=64", "model.experts_per_token=8", "model.vocab_size=50304", "train.seq_len=4096"),
    *("train.compile=true", "train.global_batch_size=8", "train.micro_batch_size=4"),
)
FULL_RECOMPUTE = "parallel.activation_checkpointing=full"
TINY = (  # of a dry run, after the settings of a row
    *("model.preset=", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=auto"),
    *("model.ffn_size=64", "model.vocab_size=64", "train.seq_len=32", "train.global_batch_size=2"),
    *("train.micro_batch_size=1", "train.dtype=fp32", "train.compile=false", "cluster.device=cpu"),
)


@dataclass(frozen=True)
class Row:
    """One measurement. `target`: the least value that the project aims at, of the metric `target_metric`."""

    name: str
    overrides: tuple[str, ...]
    target: float | None = None
    target_metric: str = "mfu_percent"


ROWS = (
    Row("llama3_1b, microbatch 4", (*LLAMA_1B, "train.micro_batch_size=4")),
    Row("llama3_1b, microbatch 8", (*LLAMA_1B, "train.micro_batch_size=8")),
    Row("llama3_1b, microbatch 16", (*LLAMA_1B, "train.micro_batch_size=16"), 60.0),
    Row("llama3_1b, microbatch 16, 2 loss chunks", (*LLAMA_1B, "train.micro_batch_size=16", "train.loss_chunks=2")),
    Row("llama3_1b, microbatch 16, 4 loss chunks", (*LLAMA_1B, "train.micro_batch_size=16", "train.loss_chunks=4")),
    Row("llama3_1b, microbatch 8, 8 loss chunks", (*LLAMA_1B, "train.micro_batch_size=8", "train.loss_chunks=8")),
    Row("llama3_1b, eager", (*LLAMA_1B, "train.micro_batch_size=4", "train.compile=false")),
    Row("llama3_1b, deterministic", (*LLAMA_1B, "train.micro_batch_size=8", "train.deterministic=true")),
    Row("llama3_1b, elastic", (*LLAMA_1B, "train.micro_batch_size=8", "train.deterministic=elastic")),
    Row("llama3_1b, documents", (*LLAMA_1B, "train.micro_batch_size=8", "data.packing=documents")),
    Row("llama3_1b, Muon", (*LLAMA_1B, "train.micro_batch_size=8", "optimizer.name=muon")),
    Row("gpt2_124m, microbatch 32", (*GPT2, "train.micro_batch_size=32"), 45.0),
    Row("gpt2_124m, microbatch 64", (*GPT2, "train.micro_batch_size=64"), 45.0),
    Row("llama3_8b, full recomputation", (*LLAMA_8B, "train.micro_batch_size=1", FULL_RECOMPUTE), 50.0),
    Row("8 of 64 experts", MOE_1B, 40.0),
    Row(
        "llama3_1b, 131,072 tokens",
        (*LLAMA_1B, "train.seq_len=131072", "train.global_batch_size=1", "train.loss_chunks=32", FULL_RECOMPUTE),
    ),
)


def measure(row: Row, *, is_dry_run: bool) -> dict[str, Any]:
    """Train with the settings of a row in this process. Return medians, kernels and the state of the device."""
    import torch

    from raytrain_hpc.bench.local_trainer import open_trainer
    from raytrain_hpc.config.loader import load_config
    from raytrain_hpc.config.model_spec import resolve_model_spec
    from raytrain_hpc.observability.peak_flops import get_peak_tflops
    from raytrain_hpc.planner.flops import compute_flops_per_token
    from raytrain_hpc.training.step_metrics import get_peak_memory_gib

    device = torch.device("cpu" if is_dry_run else "cuda:0")
    steps = PROFILED_STEPS + (3 if is_dry_run else WARMUP_STEPS + STEPS)
    config = load_config(None, [*COMMON, *row.overrides, *(TINY if is_dry_run else ()), f"train.steps={steps}"])
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    seconds, losses = [], []
    with open_trainer(config, device) as trainer:
        with sample_telemetry(is_dry_run=is_dry_run) as telemetry:
            for step in range(steps - PROFILED_STEPS):
                began = time.perf_counter()
                losses.append(trainer.train_step(step).loss)
                seconds.append(time.perf_counter() - began)
        peak_gib = get_peak_memory_gib(device)
        kernels = profile_kernels(lambda step: trainer.train_step(step), range(steps - PROFILED_STEPS, steps), device)
    tokens = config.train.global_batch_size * config.train.seq_len
    rate = tokens / median(seconds[1 if is_dry_run else WARMUP_STEPS :])
    name = "cpu" if is_dry_run else torch.cuda.get_device_name(device)
    peak = get_peak_tflops(name, config.train.dtype)
    result: dict[str, Any] = {"row": row.name, "device": name, "torch": torch.__version__, "tokens_per_sec": rate}
    for key, causal in (("mfu_percent", True), ("mfu_percent_full_square", False)):
        flops = compute_flops_per_token(spec, config.train.seq_len, causal=causal)
        result[key] = None if peak is None else 100 * rate * flops / (peak * 1e12)
    result |= {"peak_gib": peak_gib, "first_loss": losses[0], "last_loss": losses[-1], **kernels, **telemetry}
    result |= {"target": row.target, "target_metric": row.target_metric, "overrides": list(row.overrides)}
    return result


def profile_kernels(train_step: Any, steps: range, device: Any) -> dict[str, Any]:
    """Train some steps under the profiler. Return the attention kernels, the share of products, and the top kernels."""
    from torch.profiler import ProfilerActivity, profile

    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        for step in steps:
            train_step(step)
    times = {
        event.key: event.self_device_time_total if is_gpu else event.self_cpu_time_total
        for event in profiler.key_averages()
    }
    total = sum(times.values()) or 1.0
    products = sum(us for name, us in times.items() if any(word in name.lower() for word in ("gemm", "nvjet", "::mm")))
    marks = ("flash", "fmha", "sdpa", "cudnn_attention")
    attention = sorted(name for name in times if any(mark in name.lower() for mark in marks))
    top = sorted(times, key=lambda name: -times[name])[:8]
    return {
        "product_share": products / total,
        "attention_kernels": [name[:80] for name in attention],
        "top_kernels": {name[:80]: round(times[name] / total, 4) for name in top},
    }


@contextmanager
def sample_telemetry(*, is_dry_run: bool) -> Iterator[dict[str, Any]]:
    """Sample power and clock of the first GPU every second; fill the yielded dict with means when the context exits."""
    telemetry: dict[str, Any] = {}
    samples: list[list[float]] = []
    is_done = threading.Event()

    def sample() -> None:
        fields = "--query-gpu=power.draw,clocks.sm,temperature.gpu"
        query = ["nvidia-smi", fields, "--format=csv,noheader,nounits", "-i", "0"]
        while not is_done.wait(1.0):
            answer = subprocess.run(query, capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                samples.append([float(value) for value in answer.stdout.split(",")])

    thread = threading.Thread(target=sample, daemon=True)
    if not is_dry_run:
        thread.start()
    try:
        yield telemetry
    finally:
        is_done.set()
        if samples:
            columns = zip(*samples, strict=True)
            telemetry |= dict(zip(("power_w", "sm_clock_mhz", "temperature_c"), map(mean, columns), strict=True))


def read_done(path: Path) -> set[str]:
    """Return the rows that a file of results has."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["row"] for result in map(json.loads, lines) if "error" not in result}


def run_in_process(row: Row, timeout_s: float, *, is_dry_run: bool) -> dict[str, Any]:
    """Measure a row in a new process. Return its result, or an error."""
    command = [sys.executable, __file__, "--one", row.name, *(["--dry-run"] if is_dry_run else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"row": row.name, "error": f"no result within {timeout_s:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"row": row.name, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def format_line(result: dict[str, Any]) -> str:
    """Return a line of the table that goes into RESULTS.md."""
    if "error" in result:
        return f"| {result['row']} | failed: {result['error']} | | | | | |"
    mfu, square = (result[key] for key in ("mfu_percent", "mfu_percent_full_square"))
    numbers = " | ".join("-" if value is None else f"{value:.1f}" for value in (mfu, square, result["peak_gib"]))
    kernel = ", ".join(result["attention_kernels"])[:60] or "-"
    power = f"{result['power_w']:.0f} W, {result['sm_clock_mhz']:.0f} MHz" if "power_w" in result else "-"
    share = f"{100 * result['product_share']:.0f} %"
    return f"| {result['row']} | {result['tokens_per_sec']:.0f} | {numbers} | {share} | {kernel} | {power} |"


def main() -> None:
    """Measure the selected rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="pattern of row names")
    parser.add_argument("--out", type=Path, default=Path("gpu_speed.jsonl"))
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds per row")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        row = next(row for row in ROWS if row.name == arguments.one)
        print(json.dumps(measure(row, is_dry_run=arguments.dry_run)))
        return
    done = read_done(arguments.out)
    print("| row | tok/s | MFU % | MFU %, full square | peak GiB | products | attention | power, clock |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        if fnmatch.fnmatch(row.name, arguments.rows) and row.name not in done:
            result = run_in_process(row, arguments.timeout, is_dry_run=arguments.dry_run)
            with arguments.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            print(format_line(result), flush=True)


if __name__ == "__main__":
    main()
