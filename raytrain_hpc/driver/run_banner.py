"""Plan of a run as recorded in its directory, and the summary on the console before it trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from raytrain_hpc.config.schema import AUTO, Config, get_fields
from raytrain_hpc.config.value_types import format_value
from raytrain_hpc.data.samples.dataset_form import find_form, get_name
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.driver.run_setup import PreparedRun
from raytrain_hpc.driver.spare_memory import explain_too_large_audits
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.observability.console import format_count
from raytrain_hpc.planner.explain import describe_estimate, describe_expectation
from raytrain_hpc.planner.flops import CAUSAL_CONVENTION, compute_flops_per_token
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.model_state_memory import compute_state_bytes, count_max_rank_parameters
from raytrain_hpc.planner.remedies import suggest_remedies
from raytrain_hpc.planner.search import Estimate
from raytrain_hpc.planner.workload import make_workload
from raytrain_hpc.runtime.worker_spec import Script

_REFUSED_SHARE = 1.25  # of a worker's memory


def build_plan_record(
    prepared: PreparedRun, layout: Layout, batching: Batching, machine: Machine, estimate: Estimate | None
) -> dict[str, Any]:
    """Return the content of plan.json: layout, microbatches, and the estimate for `machine`, if there is one."""
    config, model_spec, train = prepared.config, prepared.model_spec, prepared.config.train
    workload = make_workload(config, model_spec)
    return {
        "started": time.time(),
        "parameters": None if prepared.custom else model_spec.count_parameters(),
        "layout": asdict(layout),
        "workers": layout.world_size,
        "microbatches": asdict(batching),
        "state_bytes_per_rank": compute_state_bytes_per_rank(prepared, layout),
        "flops_per_token": None if prepared.custom else compute_flops_per_token(model_spec, train.seq_len),
        "flops_convention": CAUSAL_CONVENTION,
        "memory": None if estimate is None else asdict(estimate.footprint),
        "expected": None if estimate is None else describe_estimate(estimate, estimate, workload, machine),
    }


def announce_run(
    prepared: PreparedRun,
    layout: Layout,
    batching: Batching,
    machine: Machine,
    estimate: Estimate | None,
    print_line: Callable[[str], None],
) -> None:
    """Print a summary of the run before it trains. Model and data of a script are its own."""
    config, model_spec, custom = prepared.config, prepared.model_spec, prepared.custom
    print_line(f"run     {config.run.dir}  seed {config.run.seed}")
    if lost_steps := _count_lost_steps(prepared):
        print_line(
            f"restart {config.run.dir} has {lost_steps} steps and no checkpoint: training starts again at step 1"
        )
    if isinstance(custom, Script):
        print_line(f"script  {' '.join([custom.path, *custom.arguments])}")
        print_line(f"layout  {layout.describe()}")
        return
    for line in describe_choices(config):
        print_line(line)
    if custom is not None:
        print_line("model   given by the caller")
    else:
        print_line(
            f"model   {format_count(model_spec.count_parameters())} parameters: {model_spec.num_layers} layers, width "
            f"{model_spec.hidden_size}, {model_spec.num_heads} heads, vocabulary {model_spec.vocab_size}; "
            f"{config.train.dtype}"
        )
    print_line(f"data    {_describe_data(prepared)}")
    state_size = compute_state_bytes_per_rank(prepared, layout)
    memory = "" if state_size is None else f"; {state_size / 2**30:.2f} GiB of state per worker"
    length = "" if isinstance(prepared.dataset, SampleDataset) else f" x {config.train.seq_len}"
    microbatches = f"{batching.count} microbatches of {batching.size}{length}"
    print_line(f"layout  {layout.describe()}; {microbatches}{memory}")
    if state_size is not None:
        check_state_fits(config, state_size, layout, machine)
    if estimate is not None:
        if machine.device.is_memory_known and not estimate.fits:
            print_line(f"memory  {describe_shortage(prepared, estimate, machine)}")
        workload = make_workload(config, model_spec)
        print_line(f"expect  {describe_expectation(estimate, workload, machine)}")
        too_large = explain_too_large_audits(config, model_spec, layout, batching, machine.device)
        if too_large and machine.device.name != "cpu":  # of unknown memory
            print_line(f"spares  {too_large}")
        if machine.device.name != "cpu" or config.logging.peak_tflops != AUTO:  # else step lines have no MFU
            print_line(
                f"mfu     counts {CAUSAL_CONVENTION}; against the device's dense bf16 peak "
                f"(logging.peak_tflops={config.logging.peak_tflops})"
            )


def check_state_fits(config: Config, state_bytes: int, layout: Layout, machine: Machine) -> None:
    """Raise LayoutError if weights, gradients and moments alone, which are known exactly, exceed a worker's memory.

    By a quarter, since devices of one name differ. What is only estimated never prevents a run.
    """
    device, state_gib = machine.device, state_bytes / 2**30
    if device.is_memory_known and state_gib > _REFUSED_SHARE * device.memory_gib:
        key, memory = "cluster.workers", f"{device.memory_gib:.1f} GiB ({device.name})"
        remedy = (
            f"weights, gradients and moments take {state_gib:.1f} GiB per worker, which has {memory}; shard them "
            "(parallel.zero=3), use more devices or a smaller model: `raytrain-hpc plan` finds what fits"
        )
        raise LayoutError(key, layout.world_size, config.origin(key), remedy)


def describe_shortage(prepared: PreparedRun, estimate: Estimate, machine: Machine) -> str:
    """Return that a run may need more memory than its devices have, and a change of the settings with which it fits."""
    remedies = suggest_remedies(prepared.config, prepared.model_spec, machine, {}, is_machine_fixed=True)
    return (
        f"warning: {estimate.memory_gib:.1f} GiB expected per worker, which has {machine.device.memory_gib:.1f} GiB "
        f"({machine.device.name}): it may run out; remedy: {remedies[0]}"
    )


def _count_lost_steps(prepared: PreparedRun) -> int:
    """Return the steps that an earlier start has trained, if there is no checkpoint to resume from; else 0."""
    if prepared.stored_batching is not None:  # from a checkpoint, in run.dir or on nodes
        return 0
    metrics = prepared.directory.read_valid_metrics()
    return int(metrics[-1]["step"]) if metrics else 0


def describe_choices(config: Config) -> list[str]:
    """Return a line with the settings that a preset brought along, and one with those chosen for the hardware."""
    values = {key: getattr(getattr(config, key.partition(".")[0]), f.name) for key, f in get_fields().items()}
    lines = []
    for label, prefix in (("preset", "preset "), ("auto", AUTO)):
        keys = [key for key in values if config.origin(key).startswith(prefix) and not key.startswith("model.")]
        if keys:
            name = f"{config.origin(keys[0]).removeprefix(prefix)}: " if label == "preset" else ""
            lines.append(f"{label:<8}{name}{', '.join(f'{key}={format_value(values[key])}' for key in keys)}")
    if config.checkpoint.interval == AUTO:
        text = "checkpoint.interval: every 10 minutes and at the end"
        if lines and lines[-1].startswith("auto"):
            lines[-1] += f", {text}"
        else:
            lines.append(f"auto    {text}")
    return lines


def compute_state_bytes_per_rank(prepared: PreparedRun, layout: Layout) -> int | None:
    """Return the bytes of weights, gradients and optimizer state on the fullest rank; None for a caller's model."""
    if prepared.custom:
        return None
    config, model_spec = prepared.config, prepared.model_spec
    parameters = count_max_rank_parameters(model_spec, layout, config.train.seq_len)
    return compute_state_bytes(parameters, layout, make_workload(config, model_spec), config.parallel.offload)


def _describe_own_data(dataset: SampleDataset, order: str) -> str:
    """Return types and sizes of a user's datasets; a stream has an order of its own."""
    sizes = [
        f"{len(d) if find_form('', d) == 'map' else 'a stream'} for validation{f' {name}' if name else ''}"
        for name, d in dataset.validation.items()
    ]
    is_map = dataset.form == "map"
    train = f"{len(dataset.train)} samples for training" if is_map else "a stream for training"
    counts = ", ".join([train, *(sizes or ["none for validation"])])
    return f"{get_name(dataset.train)} of the caller: {counts}{f'; order {order}' if is_map else ''}"


def _describe_data(prepared: PreparedRun) -> str:
    data, dataset = prepared.config.data, prepared.dataset
    if isinstance(dataset, SampleDataset):
        return _describe_own_data(dataset, data.order)
    name = data.path if not data.sources else " + ".join(source.path for source in data.sources)
    kind = "random tokens" if dataset.tokenizer is None else f"{dataset.tokenizer.name} tokens"
    counts = f"{format_count(sum(shard.num_tokens for shard in dataset.train))} for training"
    val = "none" if dataset.val is None else format_count(dataset.val.num_tokens)
    return f"{name}: {kind}, {counts}, {val} for validation, vocabulary {dataset.vocab_size}; order {data.order}"
