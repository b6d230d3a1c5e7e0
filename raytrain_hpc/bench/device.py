"""`bench device`: one accelerator, in one process: speed beside peers and the plan, memory beside the plan."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from statistics import median

from raytrain_hpc.bench.arms import plain_command, read_lines, run_platform, run_process, say, scratch
from raytrain_hpc.bench.cases import COMMON, plain_job
from raytrain_hpc.bench.table import Table, Value
from raytrain_hpc.config import Config
from raytrain_hpc.config_files import load_config
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.observe.devices import peak_tflops
from raytrain_hpc.observe.metrics import mfu
from raytrain_hpc.plan.calibration import Calibration
from raytrain_hpc.plan.flops import flops_per_token
from raytrain_hpc.plan.hardware import device_called, machine
from raytrain_hpc.plan.layout import resolve_batching, resolve_layout
from raytrain_hpc.plan.planner import Estimate, estimate
from raytrain_hpc.shape import ModelShape, resolve_shape

MFU_GOAL = 50.0  # per cent, of the first case
MEMORY_GOAL = 5.0  # per cent between what was planned and what was measured
WARMUP = 5  # steps
ROUND = 15  # steps measured a round

ALWAYS = (*COMMON, "data.path=synthetic", "cluster.workers=0", "cluster.device=cuda")
LLAMA = ("model.preset=llama3_1b", "train.seq_len=4096", "train.global_batch=8", "train.micro_batch=4")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.global_batch=32", "train.micro_batch=16")
FAST = ("train.dtype=bf16", "train.compile=true")


@dataclass(frozen=True)
class Case:
    """One way to train on a device. `peers`: also trained by a plain PyTorch loop and by transformers."""

    name: str
    words: tuple[str, ...]
    peers: bool = False


CASES = (
    Case("llama3_1b", (*LLAMA, *FAST), peers=True),
    Case("llama3_1b", (*LLAMA, *FAST, "parallel.recompute=selective")),
    Case("llama3_1b", (*LLAMA, *FAST, "parallel.recompute=full")),
    Case("llama3_1b, eager", (*LLAMA, "train.dtype=bf16", "train.micro_batch=2")),
    Case("gpt2_124m", (*GPT2, *FAST), peers=False),
    Case("gpt2_124m, eager", (*GPT2, "train.dtype=bf16", "parallel.recompute=selective")),
    Case("gpt2_124m, fp32", (*GPT2, "train.micro_batch=8", "parallel.recompute=full")),
)


@dataclass(frozen=True)
class Measured:
    """Medians over the steps after the warm-up: tokens per second, waiting for data in per cent of a step."""

    tokens_per_sec: float
    peak_gib: float
    data_percent: float | None = None


def run(rounds: int) -> Table:
    """Every case once, its steps in proportion to `rounds`. Raises ClusterError where there is no GPU."""
    name = _device()
    table = Table(
        "bench device: one process on one accelerator",
        ("model", "by", "microbatch", "recompute", "dtype", "tok/s", "MFU %", "expected tok/s", "waiting for data %")
        + ("peak GiB", "planned GiB", "off by %", "met"),
        notes=[name],
    )
    for case in CASES:
        _measure(case, WARMUP + ROUND * rounds, name, table)
    table.notes += [
        "tok/s: from the median step after five; MFU counts 6N + 6Lhs, causal counted once, of the dense bf16 peak",
        "peak: of what torch's allocator has given out; planned: the same, as `plan` counts it, without fragments",
        "plain: a loop that compiles model and loss as one, with fused AdamW and autocast; transformers: its Llama "
        "in that loop; goal of the first row 50 % MFU, of planned memory 5 %",
    ]
    return table


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        raise ClusterError("bench device: this machine has no usable GPU; run it where there is one")
    return torch.cuda.get_device_name(0)


def _measure(case: Case, steps: int, device: str, table: Table) -> None:
    words = [*ALWAYS, *case.words, f"train.steps={steps}"]
    config = load_config(None, words)
    wanted = None if config.model.vocab_size == "auto" else int(config.model.vocab_size)
    shape = resolve_shape(config.model, vocab_size=wanted or 0, seq_len=config.train.seq_len)
    plan = expected(config, shape, device)
    ours = by_platform(words)
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


def by_platform(words: list[str]) -> Measured:
    """`raytrain-hpc train` of these settings."""
    lines = run_platform(words).metrics[WARMUP:]
    return Measured(
        median(line["throughput/tokens_per_sec"] for line in lines),
        lines[-1]["memory/peak_gib"],
        100 * median(line["time/data_s"] / line["time/step_s"] for line in lines),
    )


def by_peer(config: Config, model: str) -> Measured:
    """The plain loop, on the same tokens."""
    with scratch() as directory:
        job = replace(plain_job(config, 1, directory), model=model)
        steps = directory / "steps.jsonl"
        run_process(plain_command(job, 1, directory, steps), {"OMP_NUM_THREADS": str(job.threads)})
        lines = read_lines(steps)
    unix = [line["unix"] for line in lines][WARMUP - 1 :]
    seconds = median(later - earlier for earlier, later in zip(unix, unix[1:], strict=False))
    return Measured(config.train.global_batch * config.train.seq_len / seconds, lines[-1]["peak_gib"])
