"""Builder of the callbacks of a rank: those of the user first, then those of this project, which need the state."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from raytrain_hpc.callbacks.callback import TrainingContext
from raytrain_hpc.callbacks.plugins import copy_callbacks
from raytrain_hpc.callbacks.working_copy_upload import WorkingCopyUpload
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.optimizer import Optimizer, get_local_slices
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.runtime.bit_flips import UpdateHook
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.fault_injection import FaultInjector, SupportsLoss
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.storage.object_path import ObjectPath
from raytrain_hpc.storage.working_copy import WorkingCopy
from raytrain_hpc.training.callback_list import CallbackList
from raytrain_hpc.training.callback_state import CallbackState
from raytrain_hpc.training.data_builder import Loader
from raytrain_hpc.training.step_callbacks import ReplicaCheckSchedule
from raytrain_hpc.training.stream_loader import StreamLoader


def build_callback_list(
    spec: WorkerSpec, context: ParallelContext, control: ControlChannel, *, eval_metrics: Collection[str] = ()
) -> CallbackList:
    """Return the user's callbacks, copied: in a local run, the caller's own objects would keep state of a run.

    `eval_metrics`: keys of the metrics of an evaluation; none if the run cannot evaluate.
    """
    training_context = TrainingContext(
        config=spec.config,
        rank=context.rank,
        world_size=context.layout.world_size,
        generation=spec.generation,
        device=context.device,
        start_step=spec.start_step,
        end_step=spec.end_step,
        log=control.log,
        step=spec.start_step,
    )
    return CallbackList(
        copy_callbacks(spec.callbacks),
        training_context,
        context,
        eval_metrics=eval_metrics,
        in_callback_phase=partial(control.in_phase, "callback"),
    )


def start_callbacks(
    callbacks: CallbackList, loader: Loader, model: ParallelModel, optimizer: Optimizer
) -> CallbackState:
    """Give the model to the callbacks, start their generation, and return their state, not restored yet."""
    stream_states = (loader.state,) if isinstance(loader, StreamLoader) else ()
    callbacks.add(*stream_states)
    context = callbacks.context
    context.modules, context.parameters = model.modules, get_local_slices(model.trainable_parameters)
    context.get_gradients = optimizer.get_gradients
    callbacks.run("on_generation_start")
    return CallbackState((*callbacks.user, *stream_states), callbacks.dropped, model)


def add_common_callbacks(
    callbacks: CallbackList,
    spec: WorkerSpec,
    module: SupportsLoss,
    state: ShardedState,
    replica_check: ReplicaCheck,
    on_verified: Callable[[int], None],
    control: ControlChannel,
    tracer: ComputationTracer,
    update_hooks: list[UpdateHook] | None = None,
) -> None:
    """Add the callbacks that every kind of run can have: fault injection, profiler, replica check.

    `module`: the owner of the loss. `state`: the live state. `on_verified`: see `ReplicaCheckSchedule`. `tracer`: tells
    passes of audits. `update_hooks`: those of the optimizer; None: of a script.
    """
    config, rank, run_dir = spec.config, callbacks.context.rank, parse_location(spec.config.run.dir)
    if config.fault.inject:
        cut_network = control.drop_incoming_packets
        world_size, faults = spec.layout.world_size, config.fault.inject
        callbacks.add(
            FaultInjector(faults, rank, world_size, run_dir, module, state, cut_network, tracer, update_hooks)
        )
    if config.profiler.name != "none" and rank in config.profiler.ranks:
        callbacks.add(StepProfiler(config.profiler, rank, callbacks.context.run_dir), is_slow=True)
    if isinstance(run_dir, ObjectPath) and config.cluster.workers != 0:  # with 0 the driver's process uploads them
        context = callbacks.context
        working_copy = WorkingCopy(run_dir, context.run_dir, context.log, overwrites=True)
        callbacks.add(WorkingCopyUpload(working_copy), is_slow=True)
    if config.fault.replica_check_interval:
        callbacks.add(ReplicaCheckSchedule(config.fault.replica_check_interval, replica_check, on_verified))
