"""Audit by a spare: it computes a microbatch of a running generation again, from the weights of that step."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.runtime.audit_sample import Traces
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.host_buffer import view_shards
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.builder import get_group_options
from raytrain_hpc.training.data_builder import build_loader, open_data
from raytrain_hpc.training.model_builder import (
    build_forward_backward,
    build_model,
    build_running_statistics,
    build_train_module,
)
from raytrain_hpc.training.script_random import keep_generators
from raytrain_hpc.training.state_builder import build_weights
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.traced_passes import TracedPasses
from raytrain_hpc.training.train_module import AnyBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Weights = Sequence[tuple[dict[str, Any], "NDArray[Any]"]]  # index as JSON and block of each source


class AuditCancelledError(Exception):
    """The audit was cancelled, because the spare becomes a rank."""


def compute_again(
    spec: WorkerSpec,
    audit: SpareAudit,
    rank: int,
    device: torch.device,
    rendezvous: Rendezvous | None,
    weights: Weights,
    batch: bytes,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> Traces:
    """Compute a microbatch of an audit again, and return its traces. Collective over the spares of the audit.

    `spec`: of the generation that is audited. `rank`: of this spare among those of the audit. `weights`: of all
    sources. `batch`: the microbatch if this process cannot read it, else empty. Call in a process without process
    groups; the caller destroys those that this creates. Raises AuditCancelledError on all spares if `is_cancelled`
    returns True on one before its passes, and GenerationAbortedError if one did not come to the rendezvous.
    """
    _raise_if(is_cancelled())
    spec = replace(spec, layout=audit.layout, memory_step=audit.step)  # weights stay uninitialized
    with keep_generators(device):
        context = init_process_groups(rendezvous, rank, audit.layout, device, **get_group_options(spec))
        train_module = build_train_module(spec, context)
        model = build_model(train_module, spec, context)
        _raise_if(_is_any(is_cancelled(), context))
        _load_weights(model, weights, device)
        statistics = build_running_statistics(train_module, model, spec, context)
        timers = PhaseTimer(device)
        model_step = build_forward_backward(train_module, model, spec, context, timers, statistics, _ignore_record)
        passes = TracedPasses(context, model, model_step, lambda: _drop_gradients(model))
        microbatch = _read(spec, audit, context, batch)
        _raise_if(_is_any(is_cancelled(), context))
        traces = passes.recompute(audit.step, microbatch)
    return tuple(tuple(trace.to_entries()) for trace in traces)


def _load_weights(model: ParallelModel, weights: Weights, device: torch.device) -> None:
    """Fill the weights and buffers of a model from those of all sources, which may hold some of them twice."""
    with warnings.catch_warnings():  # Ray's arrays are read-only, and so are their uses here
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        blocks = [(StateIndex.from_json(index), torch.from_numpy(block)) for index, block in weights]
    source = ShardedState(shard for index, block in blocks for shard in view_shards(block, index))
    reshard_state(build_weights(model), source, None, device)


def _read(spec: WorkerSpec, audit: SpareAudit, context: ParallelContext, batch: bytes) -> AnyBatch:
    if batch:
        loaded: AnyBatch = torch.load(io.BytesIO(batch), map_location=context.device, weights_only=False)
        return loaded
    loader = build_loader(spec, open_data(spec), context, None, ControlChannel())
    return loader.read_microbatch(audit.step, audit.microbatches[context.layout.get_dp_rank(context.rank)])


def _drop_gradients(model: ParallelModel) -> None:
    for parameter in model.parameters.values():
        parameter.grad = None


def _raise_if(is_cancelled: bool) -> None:
    if is_cancelled:
        raise AuditCancelledError("the spare becomes a rank")


def _is_any(is_cancelled: bool, context: ParallelContext) -> bool:
    """Return whether a spare of the audit is cancelled. They must leave together: others would wait for it."""
    num_cancelled = torch.tensor([float(is_cancelled)], device=context.device)
    if context.world_group is not None:
        dist.all_reduce(num_cancelled, group=context.world_group)
    return bool(num_cancelled.item())


def _ignore_record(record: Record) -> None:
    """Discard the timelines of pipelines."""
