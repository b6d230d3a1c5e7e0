"""Warm-up of the compiler: compile, in one process alone, what any rank of a generation runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from raytrain_hpc.data.dataset.sources import Dataset
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.distributed.process_groups import ParallelContext, simulate_process_groups
from raytrain_hpc.parallel.compile import skip_exchanges
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.torch_device import get_device_module, is_accelerator
from raytrain_hpc.training.builder import configure_torch, get_group_options
from raytrain_hpc.training.data_builder import build_loader, open_data
from raytrain_hpc.training.model_builder import (
    build_forward_backward,
    build_model,
    build_running_statistics,
    build_train_module,
)
from raytrain_hpc.training.script_random import keep_generators
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch, DecoderTrainModule, TrainModule

_LAYERS_PER_STAGE = 2  # the input of the first one can have another dtype, or need no gradient


def can_warm_up_compiler(spec: WorkerSpec) -> bool:
    """Return whether the run compiles something that `warm_up_compiler` can compile before.

    It cannot run scripts, nor read a user's stream: that has one position, which belongs to the ranks.
    """
    if spec.config.train.compile is not True or isinstance(spec.custom, Script):
        return False
    dataset = open_data(spec)
    return not isinstance(dataset, SampleDataset) or dataset.form == "map"


def warm_up_compiler(spec: WorkerSpec, device: torch.device, is_cancelled: Callable[[], bool] = lambda: False) -> None:
    """Compile all code that a rank of the generation runs compiled, so that this process can become any of its ranks.

    Builds, for one rank of each position in the model (pp, tp, cp and ep coordinates), the stages that this rank would
    have, in simulated process groups, and runs the passes of a training step and of an evaluation through them. A stage
    of the decoder has two layers instead of all, unless some are frozen. Only the compiled code stays.

    Call in a process without process groups. Stops early when `is_cancelled` returns True. Raises what building a rank
    and compiling it raise.
    """
    configure_torch(spec.config, device)
    spec = replace(spec, memory_step=spec.start_step)  # weights stay uninitialized
    with keep_generators(device):
        dataset = open_data(spec)
        batch, evaluates = _read_first_microbatch(spec, dataset, device), dataset.val is not None
        for layout in list_layouts(spec.layout, spec.config.parallel.reshard_over):
            for rank in list_distinct_ranks(layout):
                if is_cancelled():
                    return
                _warm_up_rank(replace(spec, layout=layout), rank, device, batch, evaluates=evaluates)
    if is_accelerator(device):
        get_device_module(device).empty_cache()


def list_layouts(layout: Layout, reshard_over: int) -> list[Layout]:
    """Return the layout, and with ZeRO on a single shard also one of several, to which the run grows with this process.

    FSDP2 changes the class of the blocks that it shards, and with it the compiled code. `reshard_over`: the setting,
    which shards are a multiple of.
    """
    if layout.zero == 0 or layout.dp_shard > 1:
        return [layout]
    return [layout, replace(layout, dp_shard=max(2, reshard_over))]


def list_distinct_ranks(layout: Layout) -> list[int]:
    """Return the first rank for each position in the model: pp, tp, cp and ep coordinates.

    Ranks that differ in nothing else run the same code.
    """
    ranks: dict[tuple[int, ...], int] = {}
    for rank in range(layout.world_size):
        coordinates = layout.get_coordinates(rank)
        position = (*(coordinates[axis] for axis in ("pp", "tp", "cp")), layout.get_expert_coordinates(rank)["ep"])
        ranks.setdefault(position, rank)
    return list(ranks.values())


def _read_first_microbatch(spec: WorkerSpec, dataset: Dataset | SampleDataset, device: torch.device) -> AnyBatch:
    """Read the first microbatch of the run: all of them have the same shapes."""
    alone = replace(spec, layout=Layout())
    loader = build_loader(alone, dataset, ParallelContext(0, alone.layout, device), None, ControlChannel())
    return loader.read(0, 0)


def _warm_up_rank(spec: WorkerSpec, rank: int, device: torch.device, batch: AnyBatch, *, evaluates: bool) -> None:
    """Compile what one rank of the generation runs. `evaluates`: the run has a validation set."""
    with simulate_process_groups(rank, spec.layout, device, **get_group_options(spec)) as context:
        _run_passes(spec, context, batch, evaluates=evaluates)


def _run_passes(spec: WorkerSpec, context: ParallelContext, batch: AnyBatch, *, evaluates: bool) -> None:
    """Run the passes of short training steps and of an evaluation as the rank of `context`, and discard the results.

    No result is used: those of simulated collectives are undefined.
    """
    layout, num_microbatches = spec.layout, spec.layout.pp
    spec = replace(spec, batching=replace(spec.batching, count=num_microbatches * layout.dp_size))
    spec = _reduce_depth(spec)
    train_module = _build_train_module(spec, context)
    model = build_model(train_module, spec, context)
    skip_exchanges(model.modules.values(), layout.ep)
    timers = PhaseTimer(context.device)
    statistics = build_running_statistics(train_module, model, spec, context)
    passes = build_forward_backward(train_module, model, spec, context, timers, statistics, lambda record: None)
    passes.train(0, num_microbatches, lambda number: batch)
    if layout.is_lockstep:
        for parameter in model.parameters.values():
            parameter.grad = None
        passes.train(0, num_microbatches, lambda number: replace(batch, is_padding=True))
    if evaluates:
        passes.evaluate(num_microbatches, lambda number: batch)


def _reduce_depth(spec: WorkerSpec) -> WorkerSpec:
    """Return the spec with a decoder of few layers, unless layers can differ: then with all of them."""
    if spec.custom is not None or any(group.frozen for group in spec.config.optimizer.groups):
        return spec
    num_stages = spec.layout.pipeline.num_stages
    layers_per_stage = min(_LAYERS_PER_STAGE, -(-spec.model_spec.num_layers // num_stages))
    return replace(spec, model_spec=replace(spec.model_spec, num_layers=layers_per_stage * num_stages))


def _build_train_module(spec: WorkerSpec, context: ParallelContext) -> TrainModule:
    """Build the train module, with equally many layers in each stage if they were reduced."""
    train_module = build_train_module(spec, context)
    num_stages = spec.layout.pipeline.num_stages
    count, remainder = divmod(spec.model_spec.num_layers, num_stages)
    if not isinstance(train_module, DecoderTrainModule) or remainder:
        return train_module
    stage_layers = [range(stage * count, (stage + 1) * count) for stage in range(num_stages)]
    return replace(train_module, stage_layers=stage_layers)
