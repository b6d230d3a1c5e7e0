"""`bench device`: speed, kernels and memory on one device, compared with the plan and with peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raytrain_hpc.bench.contenders import log_progress
from raytrain_hpc.bench.device_measurement import (
    WARMUP_STEPS,
    Measurement,
    compute_mfu_percent,
    measure_peer,
    measure_platform,
)
from raytrain_hpc.bench.local_trainer import release_memory
from raytrain_hpc.bench.peer_check import check_peers
from raytrain_hpc.bench.results_table import Table, Value
from raytrain_hpc.bench.telemetry import NOT_A_GPU, UNKNOWN
from raytrain_hpc.bench.torch_baseline import PLAIN
from raytrain_hpc.bench.workloads import COMMON_OVERRIDES
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.observability.kernel_summary import ATTENTION, GEMM
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.flops import CAUSAL_CONVENTION, FULL_CONVENTION
from raytrain_hpc.planner.hardware import find_device_preset, make_machine
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout
from raytrain_hpc.planner.search import Estimate, estimate_layout
from raytrain_hpc.torch_device import find_accelerator, get_device_name, is_accelerator

MEMORY_GOAL = 5.0  # percent between planned and measured memory
STEPS_PER_ROUND = 15

BASE_OVERRIDES = (*COMMON_OVERRIDES, "data.path=synthetic", "cluster.workers=0")
LLAMA = ("model.preset=llama3_1b", "train.seq_len=4096", "train.global_batch_size=8", "train.micro_batch_size=4")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.global_batch_size=32", "train.micro_batch_size=16")
FP32, BF16 = ("train.dtype=fp32",), ("train.dtype=bf16",)
BF16_COMPILED = (*BF16, "train.compile=true")
NO_RECOMPUTE, SELECTIVE_RECOMPUTE, FULL_RECOMPUTE = (
    (f"parallel.activation_checkpointing={mode}",) for mode in ("none", "selective", "full")
)


@dataclass(frozen=True)
class Case:
    """A model and its settings. `with_peers`: also measure a plain PyTorch loop, and the peers asked for."""

    name: str
    overrides: tuple[str, ...]
    with_peers: bool = False


# Without a GPU, the defaults: they show that everything runs, and the operators.
CPU_CASES = (Case("quickstart", (*FP32, "model.vocab_size=256", "train.compile=false"), with_peers=True),)
GPU_CASES = (
    Case("llama3_1b, compiled", (*LLAMA, *BF16_COMPILED, *NO_RECOMPUTE), with_peers=True),
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


COLUMNS = (
    *("model", "by", "microbatch", "activation checkpointing", "dtype", "tok/s", "MFU %", "MFU %, full square"),
    *("expected tok/s", "waiting for data %", "GEMM %", "attention", "W", "SM MHz", "peak GiB", "planned GiB"),
    *("off by %", "met", "first loss"),
)


def run(rounds: int, against: Sequence[str] = ()) -> Table:
    """Measure every case once, with a number of steps proportional to `rounds`: on a GPU, or on the CPU without one.

    `against`: the libraries whose models are measured too, where a plain PyTorch loop is.

    Raises:
        MissingDependencyError: A library of `against` cannot be imported.
    """
    check_peers(against)
    device = find_accelerator() or torch.device("cpu")
    name = get_device_name(device) if is_accelerator(device) else "CPU: figures that need a GPU are missing"
    table = Table("bench device: one process on one device", COLUMNS, notes=[name])
    for case in GPU_CASES if is_accelerator(device) else CPU_CASES:
        measure_case(case, WARMUP_STEPS + STEPS_PER_ROUND * rounds, device, (PLAIN, *against), table)
    table.notes += [
        f"tok/s: median step after {WARMUP_STEPS}; MFU: of the dense bf16 peak, {CAUSAL_CONVENTION}; full square: "
        f"{FULL_CONVENTION}, as PaLM and nanoGPT count",
        "GEMM %: share of matrix products in the time of all kernels of one more step; attention: its longest kernel; "
        "W and SM MHz: means over the steps, by nvidia-ml-py",
        "peak: memory allocated by torch's allocator, on a CPU resident memory; planned: by `plan`, without "
        "fragmentation",
        "plain: a PyTorch loop that compiles model and loss together, with fused AdamW and autocast; transformers: its "
        "model in the same loop; torchtitan: its Llama 3, loss, compiled blocks and FSDP2; all from the same weights",
        "goals: 50 % MFU in the first row, planned memory within 5 %",
    ]
    return table


def measure_case(case: Case, steps: int, device: torch.device, peers: Sequence[str], table: Table) -> None:
    """Add the row of the platform and, if the case has peers, one per peer. One of the steps is profiled."""
    overrides = [*BASE_OVERRIDES, f"cluster.device={device.type}", *case.overrides, f"train.steps={steps + 1}"]
    config = load_config(None, overrides)
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    platform = measure_platform(config, device)
    release_memory()
    planned: list[Value] = [NOT_A_GPU, NOT_A_GPU, None]
    expected: Value = NOT_A_GPU
    if is_accelerator(device):
        plan = predict(config, spec, get_device_name(device))
        expected = config.train.global_batch_size * config.train.seq_len / plan.step_s
        planned_gib = plan.footprint.allocated / 2**30
        error_percent = 100 * (planned_gib / platform.peak_gib - 1)
        planned = [planned_gib, error_percent, abs(error_percent) <= MEMORY_GOAL]
    _add_row(table, case, config, "the platform", device, platform, expected, planned)
    for peer in peers if case.with_peers else ():
        measured = measure_peer(config, peer, platform)
        _add_row(table, case, config, peer, device, measured, None, [None, None, None])


def _add_row(
    table: Table,
    case: Case,
    config: Config,
    system: str,
    device: torch.device,
    measured: Measurement,
    expected: Value,
    planned: Sequence[Value],
) -> None:
    log_progress(f"{case.name} by {system}: {measured.tokens_per_sec:.0f} tok/s, {measured.peak_gib:.2f} GiB")
    is_gpu = is_accelerator(device)
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    mfu: list[Value] = [NOT_A_GPU, NOT_A_GPU]
    telemetry: list[Value] = [NOT_A_GPU, NOT_A_GPU]
    if is_gpu:
        name, rate = get_device_name(device), measured.tokens_per_sec
        mfu = [compute_mfu_percent(config, spec, name, rate, causal=causal) for causal in (True, False)]
        values = measured.telemetry.power_w, measured.telemetry.sm_clock_mhz
        telemetry = [UNKNOWN if value is None else value for value in values]
    table.add_row(
        case.name,
        system,
        config.train.micro_batch_size,
        config.parallel.activation_checkpointing,
        config.train.dtype,
        measured.tokens_per_sec,
        *mfu,
        expected,
        measured.data_percent,
        100 * measured.kernels.compute_share(GEMM),
        shorten_kernel_name(next(iter(measured.kernels.list_names(ATTENTION)), "none")),
        *telemetry,
        measured.peak_gib,
        *planned,
        measured.losses[0],
    )


def shorten_kernel_name(name: str) -> str:
    """Return the name of a kernel without its return type, template arguments and parameters."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:80]


def predict(config: Config, model_spec: ModelSpec, device: str) -> Estimate:
    """Estimate speed and memory on one device of this name, with the default calibration."""
    machine = make_machine(find_device_preset(device) or "h100", 1, 1)
    layout = resolve_layout(config, 1)
    return estimate_layout(config, model_spec, machine, Calibration(), layout, resolve_batching(config, layout))
