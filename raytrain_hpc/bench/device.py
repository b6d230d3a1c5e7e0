"""`bench device`: one accelerator, in one process: speed beside peers and the plan, memory beside the plan."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, replace
from statistics import median

import torch

from raytrain_hpc.bench.contenders import plain_command, read_lines, run_process, say, scratch
from raytrain_hpc.bench.local_trainer import give_back_memory, one_worker, the_gpu
from raytrain_hpc.bench.results_table import Table, Value
from raytrain_hpc.bench.workloads import COMMON, plain_job
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import ModelShape, resolve_shape
from raytrain_hpc.config.schema import Config
from raytrain_hpc.observability.metrics import mfu
from raytrain_hpc.observability.peak_flops import peak_tflops
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import flops_per_token
from raytrain_hpc.planner.hardware import device_called, machine
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout
from raytrain_hpc.planner.search import Estimate, estimate

MEMORY_GOAL = 5.0  # per cent between what was planned and what was measured
WARMUP = 5  # steps
ROUND = 15  # steps measured a round

ALWAYS = (*COMMON, "data.path=synthetic", "cluster.workers=0", "cluster.device=cuda")
LLAMA = ("model.preset=llama3_1b", "train.seq_len=4096", "train.global_batch=8", "train.micro_batch=4")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.global_batch=32", "train.micro_batch=16")
BF16 = ("train.dtype=bf16",)
FAST = (*BF16, "train.compile=true")
NONE, SELECTIVE, FULL = ((f"parallel.recompute={mode}",) for mode in ("none", "selective", "full"))


@dataclass(frozen=True)
class Case:
    """One way to train on a device. `peers`: also trained by a plain PyTorch loop and by transformers."""

    name: str
    words: tuple[str, ...]
    peers: bool = False


CASES = (
    Case("llama3_1b, compiled", (*LLAMA, *FAST, *NONE), peers=True),
    Case("llama3_1b, compiled", (*LLAMA, *FAST, *NONE, "train.micro_batch=8")),
    Case("llama3_1b, compiled", (*LLAMA, *FAST, *SELECTIVE)),
    Case("llama3_1b, compiled", (*LLAMA, *FAST, *FULL)),
    Case("llama3_1b", (*LLAMA, *BF16, *NONE, "train.micro_batch=2")),
    Case("llama3_1b", (*LLAMA, *BF16, *SELECTIVE, "train.micro_batch=2")),
    Case("gpt2_124m, compiled", (*GPT2, *FAST, *NONE)),
    Case("gpt2_124m, compiled", (*GPT2, *FAST, *SELECTIVE)),
    Case("gpt2_124m", (*GPT2, *BF16, *NONE)),
    Case("gpt2_124m", (*GPT2, *NONE, "train.micro_batch=8")),
    Case("gpt2_124m", (*GPT2, *FULL, "train.micro_batch=8")),
)


@dataclass(frozen=True)
class Measured:
    """Medians over the steps after the warm-up: tokens per second, waiting for data in per cent of a step."""

    tokens_per_sec: float
    peak_gib: float
    data_percent: float | None = None


def run(rounds: int) -> Table:
    """Every case once, its steps in proportion to `rounds`. Raises ClusterError where there is no GPU."""
    device = the_gpu("device")
    name = torch.cuda.get_device_name(device)
    table = Table(
        "bench device: one process on one accelerator",
        ("model", "by", "microbatch", "recompute", "dtype", "tok/s", "MFU %", "expected tok/s", "waiting for data %")
        + ("peak GiB", "planned GiB", "off by %", "met"),
        notes=[name],
    )
    for case in CASES:
        _measure(case, WARMUP + ROUND * rounds, device, table)
    table.notes += [
        "tok/s: from the median step after five; MFU counts 6N + 6Lhs, causal counted once, of the dense bf16 peak",
        "peak: of what torch's allocator has given out; planned: the same, as `plan` counts it, without fragments",
        "plain: a loop that compiles model and loss as one, with fused AdamW and autocast; transformers: its Llama "
        "in that loop; goal of the first row 50 % MFU, of planned memory 5 %",
    ]
    return table


def _measure(case: Case, steps: int, where: torch.device, table: Table) -> None:
    device = torch.cuda.get_device_name(where)
    words = [*ALWAYS, *case.words, f"train.steps={steps}"]
    config = load_config(None, words)
    shape = resolve_shape(config.model, vocab_size=None, seq_len=config.train.seq_len)
    plan = expected(config, shape, device)
    ours = by_platform(config, where)
    give_back_memory()
    planned = plan.footprint.allocated / 2**30
    off = 100 * (planned / ours.peak_gib - 1)
    rate = config.train.global_batch * config.train.seq_len / plan.step_s
    tail: list[Value] = [rate, ours.data_percent, ours.peak_gib, planned, off, abs(off) <= MEMORY_GOAL]
    _add(table, case, config, "the platform", ours, _mfu(config, shape, device, ours), tail)
    for peer, kind in (("plain", "decoder"), ("transformers", "transformers")) if case.peers else ():
        if kind == "transformers" and importlib.util.find_spec("transformers") is None:
            continue
        theirs = by_peer(config, kind)
        _add(table, case, config, peer, theirs, _mfu(config, shape, device, theirs), [None, None, theirs.peak_gib])


def _add(
    table: Table, case: Case, config: Config, by: str, found: Measured, share: float | None, tail: list[Value]
) -> None:
    say(f"{case.name} by {by}: {found.tokens_per_sec:.0f} tok/s, {found.peak_gib:.2f} GiB")
    cut: list[Value] = [config.train.micro_batch, config.parallel.recompute, config.train.dtype]
    row = [case.name, by, *cut, found.tokens_per_sec, share, *tail]
    table.add(*row, *[None] * (len(table.columns) - len(row)))


def _mfu(config: Config, shape: ModelShape, device: str, found: Measured) -> float | None:
    peak = peak_tflops(device, config.train.dtype)
    share = mfu(found.tokens_per_sec, flops_per_token(shape, config.train.seq_len), 1, peak)
    return None if share is None else 100 * share


def expected(config: Config, shape: ModelShape, device: str) -> Estimate:
    """What is planned for these settings on one such device, with the calibration that everybody has."""
    there = machine(device_called(device) or "h100", 1, 1)
    layout = resolve_layout(config, 1)
    return estimate(config, shape, there, Calibration(), layout, resolve_batching(config, layout))


def by_platform(config: Config, device: torch.device) -> Measured:
    """The platform's own loop, in this process."""
    seconds, waits = [], []
    with one_worker(config, device) as trainer:
        for step in range(config.train.steps):
            if step == 1:  # what compilers and autotuning took is no part of training
                torch.cuda.reset_peak_memory_stats(device)
            began = time.perf_counter()
            result = trainer.train_step(step)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
            waits.append(result.data_s / seconds[-1])
        peak = torch.cuda.max_memory_allocated(device) / 2**30
    rate = config.train.global_batch * config.train.seq_len / median(seconds[WARMUP:])
    return Measured(rate, peak, 100 * median(waits[WARMUP:]))


def by_peer(config: Config, model: str) -> Measured:
    """The plain loop, on the same tokens."""
    with scratch() as directory:
        job = replace(plain_job(config, 1, directory), model=model)
        steps = directory / "steps.jsonl"
        run_process(plain_command(job, 1, directory, steps), {"OMP_NUM_THREADS": str(job.threads)})
        lines = read_lines(steps)
    unix = [line["unix"] for line in lines[WARMUP - 1 :]]
    seconds = median(later - earlier for earlier, later in zip(unix, unix[1:], strict=False))
    return Measured(config.train.global_batch * config.train.seq_len / seconds, lines[-1]["peak_gib"])
