"""Puts one rank together: groups, model, weights, optimizer, data, checkpoint; each part built once, passed on."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import Blocks, DeliveredStream
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import packing_of
from raytrain_hpc.data.loader.stream import Stream
from raytrain_hpc.distributed.abort import Abort
from raytrain_hpc.distributed.handshake import tell
from raytrain_hpc.distributed.process_groups import Place, join
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import Replicas
from raytrain_hpc.elastic.loss_spikes import WINDOW
from raytrain_hpc.elastic.state_partition import parts
from raytrain_hpc.model.decoder import loss_sum
from raytrain_hpc.model.lora import MARK
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.grad_norm import ExactNorm, GradientNorm, Region
from raytrain_hpc.optim.offload import home_of
from raytrain_hpc.optim.optimizer import MOMENTS, Optimizer, slices_of
from raytrain_hpc.parallel.deterministic_reduce import canonical_shares
from raytrain_hpc.parallel.parallelize import Parallel, compute_type, own_positions, parallelise, stream_type
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.parallel.vocab_parallel import vocabulary_loss_sum
from raytrain_hpc.planner.layout import first_rank_of
from raytrain_hpc.planner.stage_split import split_layers
from raytrain_hpc.runtime.control_channel import Control, Record
from raytrain_hpc.runtime.fault_injection import Injector
from raytrain_hpc.runtime.worker_spec import CustomModel, WorkerSpec
from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.state.shard_index import Box, StateIndex, first_held
from raytrain_hpc.state.sharded_state import Held, Holding, dtype_name, slice_of
from raytrain_hpc.training.checkpointer import Saver
from raytrain_hpc.training.device_loader import Feed
from raytrain_hpc.training.expert_bias import Balance
from raytrain_hpc.training.forward_backward import Passes, WholeModel
from raytrain_hpc.training.pipeline_forward_backward import Pipelined, Timeline
from raytrain_hpc.training.snapshot_manager import Keeper
from raytrain_hpc.training.snapshot_peers import Buddies
from raytrain_hpc.training.state_loader import LOSSES, GoingBack, restore
from raytrain_hpc.training.step_guard import BadSteps
from raytrain_hpc.training.timers import Stopwatch
from raytrain_hpc.training.train_module import CustomTask, DecoderTask, Task
from raytrain_hpc.training.trainer import Trainer


def build_trainer(
    spec: WorkerSpec,
    rank: int,
    device: torch.device,
    meeting: Rendezvous | None,
    control: Control,
    blocks: Blocks | None = None,
    memory: Snapshots | None = None,
) -> Trainer:
    """Everything that rank `rank` of this generation needs, its state loaded and checked against its replicas.

    `blocks`: where others read for it. `memory`: the snapshots that this process holds of earlier generations, and
    where those of this one go. Raises StateLost where nobody holds a part of the step to go on from.
    """
    marks: Record = {"type": "ready", "rank": rank, "build_began": time.time()}
    set_kernels(config := spec.config, device)
    place = _join(spec, rank, device, meeting, marks)
    task = _task(spec, place)
    parallel = _model(task, spec, place)
    optimizer, recent = _optimizer(parallel, spec, rank), _recent_losses(config, device)
    holding, offered = state_of(parallel, optimizer, recent), _offered(spec, memory)
    buddies = Buddies(spec, rank, memory, device)
    told = tell(holding.index(), offered.index(), place, buddies.openings)  # when all groups are made
    store = CheckpointStore(Path(config.run.dir) / "checkpoints")
    restore(spec, place, holding, offered, told, store)
    (replicas := Replicas(holding, place)).compare()
    keeper = Keeper(config, memory, holding, _lends(spec, parallel), buddies.copying(told), optimizer.rest)
    keeper.begin(spec.first, spec.generation, buddies.own, buddies.opened(told, control.note))
    saver = Saver(holding, told.holdings, place, store, spec.generation, config.checkpoint, control.emit)
    go_back = GoingBack(store, config.checkpoint.every, place, holding, told.holdings, saver.finish, optimizer.rest)
    optimizer.rest()
    feed, evaluation = _data(spec, place, control, blocks)
    control.arm(Abort(told.sockets))
    control.emit(marks | {"model": time.time()})
    emit, watch = control.emit if rank == 0 else _discard, Stopwatch(device)
    return Trainer(
        config=config,
        place=place,
        batching=spec.batching,
        buffers=_statistics(task, parallel),
        balance=_balance(spec, parallel, place),
        passes=_passes(task, parallel, spec, place, watch, control.emit),
        watch=watch,
        bad_steps=BadSteps(config.fault, recent, partial(first_rank_of, spec.layout, spec.batching), go_back, emit),
        optimizer=optimizer,
        norm=_norm(parallel, told.holdings, place, exact=_elastic(config)),
        feed=feed,
        evaluation=evaluation,
        saver=saver,
        profiler=StepProfiler(config.observe, rank, Path(config.run.dir)),
        generation=spec.generation,
        emit=emit,
        control=control,
        keeper=keeper,
        replicas=replicas,
        held=_held_gib(parallel, optimizer),
        injector=Injector(config.fault.inject, rank, spec.layout.world, Path(config.run.dir), task),
        unevaluated=spec.unevaluated,
        unsaved=spec.unsaved,
    )


def _join(spec: WorkerSpec, rank: int, device: torch.device, meeting: Rendezvous | None, marks: Record) -> Place:
    tied = spec.custom is None and spec.shape.tie_embeddings
    place = join(meeting, rank, spec.layout, device, tied=tied, balanced=_balances(spec))
    marks["groups"] = time.time()
    return place


def _balances(spec: WorkerSpec) -> bool:
    return spec.custom is None and spec.shape.balance == "bias"


def _balance(spec: WorkerSpec, parallel: Parallel, place: Place) -> Balance:
    return Balance(parallel.modules.values() if _balances(spec) else (), spec.shape.balance_rate, place.batch_group)


def _optimizer(parallel: Parallel, spec: WorkerSpec, rank: int) -> Optimizer:
    config = spec.config
    home = home_of(config, slices_of(parallel.trained), MOMENTS[config.train.optimizer], rank)
    optimizer = Optimizer(parallel.trained, config.train, home)
    optimizer.set_steps(spec.first)
    return optimizer


def _lends(spec: WorkerSpec, parallel: Parallel) -> bool:
    """Whether what is live is the whole state of a step: buffers change in forward passes."""
    return max(parts(spec.layout)) == 0 and not _saved_buffers(parallel)


def _offered(spec: WorkerSpec, memory: Snapshots | None) -> Holding:
    """What this process has of the step to go on from."""
    return Holding() if memory is None or spec.memory_step is None else memory.at(spec.memory_step)


def _recent_losses(config: Config, device: torch.device) -> torch.Tensor | None:
    """Room for them where spikes are looked for."""
    if not config.fault.spike_deviations:
        return None
    return torch.full((WINDOW,), torch.nan, dtype=torch.float64, device=device)


def state_of(parallel: Parallel, optimizer: Optimizer, recent: torch.Tensor | None = None) -> Holding:
    """What this rank holds of the training state: weights, persistent buffers, optimizer moments, recent losses."""
    weights = [_Slice(parallel, name) for name in parallel.parameters]
    held = [one for weight in weights for one in weight.held("model", weight.tensor)]
    held += [Held.of(f"model.{name}", buffer) for name, buffer in _saved_buffers(parallel)]
    for kind, moments in optimizer.moments.items():
        trained = [weight for weight in weights if weight.name in moments]
        held += [one for weight in trained for one in weight.held(f"optimizer.{kind}", moments[weight.name])]
    held += [] if recent is None else [Held.of(LOSSES, recent)]
    return Holding(held)


def _held_gib(parallel: Parallel, optimizer: Optimizer) -> dict[str, float]:
    """GiB of weights and moments that this rank holds between two steps."""
    moments = [moment for of_kind in optimizer.moments.values() for moment in of_kind.values()]
    sizes = {
        "weights": sum(slice_of(parameter)[2].nbytes for parameter in parallel.parameters.values()),
        "moments": sum(moment.nbytes for moment in moments),
    }
    return {f"memory/{kind}_gib": size / 2**30 for kind, size in sizes.items()}


def _saved_buffers(parallel: Parallel) -> list[tuple[str, torch.Tensor]]:
    """The persistent ones; a second name of a tied weight is no buffer."""
    found = []
    for module in parallel.modules.values():
        buffers = dict(module.named_buffers())
        found += [(name, buffers[name]) for name in module.state_dict() if name in buffers]
    return found


class _Slice:
    """What a rank stores of one parameter, and which parts of the global tensor that is."""

    def __init__(self, parallel: Parallel, name: str):
        _, box, self.tensor = slice_of(parallel.parameters[name])
        self.name, self.cut = name, parallel.cut(name)
        self.parts = self.cut.within(box)

    def held(self, kind: str, tensor: torch.Tensor) -> list[Held]:
        """The parts of a tensor laid out like this one, as state: the parameter itself, or a moment of it."""
        everything = Box.whole(tensor.shape)
        return [
            Held(
                f"{kind}.{self.cut.name}",
                self.cut.shape,
                dtype_name(tensor.dtype),
                part.whole,
                tensor[part.own.slices_in(everything)],
            )
            for part in self.parts
        ]


def _norm(parallel: Parallel, indexes: list[StateIndex], place: Place, *, exact: bool) -> GradientNorm:
    """Of what several ranks of a replica hold, the first one's counts."""
    ranks = place.state_ranks()
    slices = [_Slice(parallel, name) for name in parallel.parameters]
    names = {f"model.{one.cut.name}" for one in slices}
    counted = first_held([indexes[rank] for rank in ranks], ranks.index(place.rank), names)
    regions: dict[str, list[Region]] = {}
    numbers: Counter[str] = Counter()
    for one in slices:
        name = f"model.{one.cut.name}"
        for part in one.parts:
            for box in (box for number, box in counted[name] if number == numbers[name]):
                start = [o + b - w for o, b, w in zip(part.own.offsets, box.offsets, part.whole.offsets, strict=True)]
                region = Box(tuple(start), box.sizes).slices_in(Box.whole(one.tensor.shape))
                regions.setdefault(one.name, []).append(None if box.numel == one.tensor.numel() else region)
            numbers[name] += 1
    kind = ExactNorm if exact else GradientNorm
    return kind(regions, place.state_group, place.device)


def _discard(said: object) -> None:
    """Only rank 0 reports steps and notes: every rank would say the same."""


def load(config: Config) -> None:
    """Import what such a run needs beyond this module, for a second or more: a generation is not to wait for it."""
    if config.parallel.zero:
        import raytrain_hpc.parallel.fsdp
        import raytrain_hpc.state.dtensor  # noqa: F401


def set_kernels(config: Config, device: torch.device) -> None:
    """What a process computes with: modules, threads, determinism, the device.

    First the modules: those that were loaded inside a generation would keep its groups alive.
    """
    load(config)
    torch.set_num_threads(config.cluster.threads)
    wanted = config.train.deterministic is not False
    if config.train.compile:
        torch.use_deterministic_algorithms(wanted)  # tells the compiler too, and so loads it: seconds
    else:
        torch.set_deterministic_debug_mode("error" if wanted else "default")
    if device.type == "cuda":
        if wanted:  # read when the first handle is made; without it cuBLAS is refused
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.cuda.reset_peak_memory_stats(device)


def _elastic(config: Config) -> bool:
    return config.train.deterministic == "elastic"


def _task(spec: WorkerSpec, place: Place) -> Task:
    if isinstance(spec.custom, CustomModel):
        return CustomTask(spec.custom.factory, spec.custom.loss, spec.config)
    shape, config, axis = spec.shape, spec.config, place.axes.get("tp")
    positions = own_positions(config.train.seq_len, place.axes)
    stages = split_layers(shape, config.train.seq_len, spec.layout.pipeline.stages)
    if axis is None:
        whole = torch.compile(loss_sum) if config.train.compile else loss_sum
        return DecoderTask(shape, config.run.seed, positions, positions, stages, whole)
    share = axis.share(len(positions))
    loss = partial(vocabulary_loss_sum, axis=axis, rows=shape.vocab_size)
    return DecoderTask(shape, config.run.seed, positions, positions[share.start : share.stop], stages, loss)


def _passes(
    task: Task,
    parallel: Parallel,
    spec: WorkerSpec,
    place: Place,
    watch: Stopwatch,
    emit: Callable[[Record], None],
) -> Passes:
    dtype = spec.config.train.dtype
    if place.links is None or not isinstance(task, DecoderTask):
        return WholeModel(task, parallel, dtype, place.device, watch)
    pipeline = Pipeline(spec.layout.pipeline, place.at["pp"], place.links)
    width = (len(task.rows), spec.shape.hidden_size)
    timeline = Timeline(place.rank, spec.config.observe.timeline_every, emit)
    stream = stream_type(dtype, spec.layout)
    return Pipelined(task, parallel, pipeline, dtype, stream, width, place.device, timeline, watch)


def _model(task: Task, spec: WorkerSpec, place: Place) -> Parallel:
    config = spec.config
    stages = place.layout.pipeline.stages_of(place.at["pp"])
    modules = {stage: task.build(stage).to(compute_type(config.train.dtype)) for stage in stages}
    if place.mesh is not None:
        for module in modules.values():
            _broadcast_given_weights(module)
    parallel = parallelise(
        modules,
        config,
        place.layout,
        place.mesh,
        place.device,
        place.axes,
        place.experts,
        canonical_shares(place.layout, spec.batching, place.rank) if _elastic(config) else None,
        keyed_randomness=task.keyed_randomness,
    )
    if spec.fresh:  # what is loaded need not be drawn
        _draw_weights(task, parallel, "" if spec.initial is None else MARK)
    if isinstance(task, DecoderTask):  # its buffers are counts and biases
        for buffer in (one for module in modules.values() for one in module.buffers()):
            buffer.zero_()
    return parallel


def _draw_weights(task: Task, parallel: Parallel, part: str) -> None:
    """First values of parameters whose canonical names have `part` in them."""
    slices: dict[str, list[_Slice]] = {}
    for name in parallel.parameters:
        slices.setdefault(parallel.cut(name).name, []).append(_Slice(parallel, name))
    for canonical, pieces in slices.items():
        if part not in canonical:
            continue
        whole = task.initial(canonical, torch.Size(pieces[0].cut.shape))
        if whole is not None:
            for held in (held for one in pieces for held in one.held("model", one.tensor)):
                held.tensor.copy_(whole[held.box.slices_in(Box.whole(held.shape))])


def _statistics(task: Task, parallel: Parallel) -> list[torch.Tensor]:
    """Buffers that every rank changes in its own way: a user's module can have them, a decoder has none."""
    modules = () if isinstance(task, DecoderTask) else parallel.modules.values()
    return [buffer for module in modules for buffer in module.buffers()]


def _broadcast_given_weights(module: nn.Module) -> None:
    """A user's factory need not be deterministic: all ranks start from what rank 0 made."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            dist.broadcast(tensor.detach(), 0)


def _data(spec: WorkerSpec, place: Place, control: Control, blocks: Blocks | None) -> tuple[Feed, EvaluationSet | None]:
    config, layout = spec.config, spec.layout
    dataset = spec.recipe.dataset()
    local = spec.recipe.stream(dataset)
    stream: Stream = local
    if blocks is not None:
        stream = DeliveredStream(local, blocks, control.note if place.rank == 0 else _discard)
    share = spec.batching.shares(layout.data_parallel)[layout.data_rank(place.rank)]
    feed = Feed(stream, spec.batching, share, place.device, config.data)
    if dataset.val is None:
        return feed, None
    packing = packing_of(config.data.packing, config.train.seq_len)
    return feed, EvaluationSet(dataset.val, packing, spec.batching.size, limit=config.train.eval_samples)
