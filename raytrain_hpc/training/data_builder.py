"""Builder of a rank's data: the loader of training microbatches and the validation sets, of tokens or samples."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from raytrain_hpc.data.dataset.sources import Dataset
from raytrain_hpc.data.loader.block_stream import BlockSource, BlockStream
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import build_packing
from raytrain_hpc.data.loader.stream import Stream
from raytrain_hpc.data.samples.dataset_form import find_form, get_loader_batch_size
from raytrain_hpc.data.samples.dataset_settings import check_loader
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.data.samples.sample_reader import SampleReader
from raytrain_hpc.data.samples.stream_reader import StreamReader
from raytrain_hpc.data.samples.stream_source import StreamSource
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.observability.metrics import get_eval_key
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import CustomModel, DatasetReference, WorkerSpec
from raytrain_hpc.storage.read_retry import RETRY_TIMEOUT_S, ReadRetry
from raytrain_hpc.training.device_loader import DeviceLoader, TokenEvalBatches
from raytrain_hpc.training.evaluator import EvalBatches, Evaluator
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.sample_loader import SampleEvalBatches, SampleLoader
from raytrain_hpc.training.stream_loader import StreamEvalBatches, StreamLoader
from raytrain_hpc.training.stream_state import StreamState
from raytrain_hpc.training.timers import PhaseTimer
from raytrain_hpc.training.train_module import AnyBatch


class Loader(Protocol):
    """Training data of one rank."""

    def prefetch(self, start_step: int, end_step: int) -> AbstractContextManager[None]:
        """Read ahead inside the context."""

    def read(self, step: int, slot: int) -> AnyBatch:
        """Return the microbatch of a slot of a step on the device."""

    def reread(self, step: int, slot: int) -> AnyBatch:
        """Read the same microbatch again."""

    @property
    def reads_any_microbatch(self) -> bool:
        """Whether this rank can read the microbatches of all ranks."""

    def read_microbatch(self, step: int, microbatch: int) -> AnyBatch:
        """Read a logical microbatch of the step whose microbatches are read next, or were read last."""


def open_data(spec: WorkerSpec, control: ControlChannel | None = None) -> Dataset | SampleDataset:
    """Return the dataset of a run: the user's own, or the token shards of the config.

    `control`: gets lines about storage that fails, and the progress of a copy to `data.local_cache`.
    """
    dataset = spec.custom.dataset if isinstance(spec.custom, CustomModel) else None
    if isinstance(dataset, DatasetReference):
        raise TypeError("the spec still refers to the dataset in the object store; resolve it before the rank is built")
    if dataset is not None:
        return dataset
    check_files = spec.memory_step is None  # those of a recovery from memory were there
    if control is None:
        return spec.stream_spec.open_dataset(ReadRetry(RETRY_TIMEOUT_S), check_files=check_files)
    retry, progress = ReadRetry(RETRY_TIMEOUT_S, control.log), _CopyProgress(control, spec.config.data.local_cache)
    with control.in_phase("building"):
        return spec.stream_spec.open_dataset(retry, progress, check_files=check_files)


@dataclass
class _CopyProgress:
    """Reports that this rank copies a dataset, block by block, while others wait for it."""

    control: ControlChannel
    directory: str
    is_logged: bool = False

    def __call__(self) -> None:
        if self.control.is_aborted:  # another rank has failed: end without completing the copy
            raise GenerationAbortedError("its generation was aborted while a dataset was copied")
        self.control.set_phase("loading")
        if not self.is_logged:
            self.is_logged = True
            node = socket.gethostname()
            self.control.log(f"data    copying the dataset to data.local_cache={self.directory} on node {node}")


def build_loader(
    spec: WorkerSpec,
    dataset: Dataset | SampleDataset,
    context: ParallelContext,
    blocks: BlockSource | None,
    control: ControlChannel,
) -> Loader:
    """Return the loader of this rank's training microbatches. `blocks`: tokens that other processes read."""
    layout, config = spec.layout, spec.config
    microbatches = spec.batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(context.rank)]
    if isinstance(dataset, SampleDataset):
        if dataset.form != "map":
            return _build_stream_loader(spec, dataset, context, control)
        reader = SampleReader(dataset.train, dataset.collate, config.run.seed)
        order = dataset.open_order(config, spec.batching.size)
        return SampleLoader(reader, order, microbatches, context.device, config.data)
    local_stream = spec.stream_spec.open_stream(dataset)
    log = control.log if context.rank == 0 else _ignore_line
    stream: Stream = local_stream if blocks is None else BlockStream(local_stream, blocks, log)
    return DeviceLoader(stream, spec.batching, microbatches, context.device, config.data)


def _build_stream_loader(
    spec: WorkerSpec, dataset: SampleDataset, context: ParallelContext, control: ControlChannel
) -> StreamLoader:
    layout, config, batching = spec.layout, spec.config, spec.batching
    is_partitioned = dataset.form == "function"
    part = (layout.get_dp_rank(context.rank), layout.dp_size) if is_partitioned else (0, 1)
    source = StreamSource(dataset.train, part=part, is_worker=config.cluster.workers != 0)
    microbatches = batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(context.rank)]
    reader = StreamReader(source, dataset.collate, config.run.seed, (batching.count, batching.size), microbatches)
    if is_partitioned and reader.yields_batches:
        check_loader(config, batching.size, reader.batch_size)
    log = control.log if context.rank == 0 else _ignore_line
    state = StreamState(context, is_partitioned=is_partitioned)
    on_wait = partial(control.set_phase, "loading")
    return StreamLoader(reader, state, part, context.device, config.data, log, on_wait)


def build_evaluator(
    spec: WorkerSpec,
    dataset: Dataset | SampleDataset,
    context: ParallelContext,
    model_step: ForwardBackward,
    control: ControlChannel,
    timers: PhaseTimer,
) -> Evaluator | None:
    """Return the evaluation on the validation sets, or None if there is none."""
    eval_sets = _build_eval_sets(spec, dataset, context)
    return Evaluator(context, model_step, eval_sets, control, timers) if eval_sets else None


def list_eval_metrics(dataset: Dataset | SampleDataset) -> list[str]:
    """Return the keys of the metrics of an evaluation; none if there is no validation set."""
    if dataset.val is None:
        return []
    names = dataset.validation if isinstance(dataset, SampleDataset) else ()
    return [get_eval_key(), *map(get_eval_key, names)]


def _build_eval_sets(
    spec: WorkerSpec, dataset: Dataset | SampleDataset, context: ParallelContext
) -> Mapping[str, EvalBatches]:
    """Return the batches of the validation sets, by name; a single one has the name ""."""
    config, batch_size = spec.config, spec.batching.size
    if isinstance(dataset, SampleDataset):
        return {name: _build_own_eval_set(spec, dataset, context, name) for name in dataset.validation}
    if dataset.val is None:
        return {}
    packing = build_packing(config.data.packing, config.train.seq_len)
    eval_set = EvaluationSet(dataset.val, packing, batch_size, max_samples=config.eval.samples)
    return {"": TokenEvalBatches(eval_set, context.device)}


def _build_own_eval_set(spec: WorkerSpec, dataset: SampleDataset, context: ParallelContext, name: str) -> EvalBatches:
    """Return the batches of a user's validation set. Every rank reads the whole of a stream."""
    validation, config, layout = dataset.validation[name], spec.config, spec.layout
    label, random_name, seed = f"val_dataset {name}".rstrip(), f"val {name}", config.run.seed
    if (form := find_form(label, validation)) == "map":
        reader = SampleReader(validation, dataset.collate, seed, random_name)
        return SampleEvalBatches(reader, spec.batching.size, config.eval.samples, context.device)
    batch_size = (get_loader_batch_size(validation) if form == "batches" else None) or spec.batching.size
    dp_rank = layout.get_dp_rank(context.rank)
    source = StreamSource(validation, label, is_worker=config.cluster.workers != 0)
    batching, kept = (layout.dp_size, batch_size), range(dp_rank, dp_rank + 1)
    stream_reader = StreamReader(source, dataset.collate, seed, batching, kept, random_name)
    return StreamEvalBatches(stream_reader, label, config.eval.samples, context.device)


def _ignore_line(text: str) -> None:
    """Discard a line that rank 0 prints for all ranks."""
