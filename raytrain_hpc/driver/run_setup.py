"""Everything about a run that can be settled, or refused, before a cluster is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease, check_writable
from raytrain_hpc.checkpoint.manifest import LORA_META_KEY, Checkpoint
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.data.dataset.sources import STDLIB, SYNTHETIC, Dataset, open_dataset
from raytrain_hpc.data.dataset.storage import is_remote
from raytrain_hpc.data.loader.packing import PaddedPacking, build_packing
from raytrain_hpc.data.loader.stream import DataState, LocalStream, open_stream
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    MissingDependencyError,
    RunDirectoryError,
)
from raytrain_hpc.observability.experiment_trackers import check_trackers
from raytrain_hpc.observability.profiler import check_profiler
from raytrain_hpc.planner.comm_volume import compute_bytes_by_axis
from raytrain_hpc.planner.layout import (
    Batching,
    Layout,
    check_axes,
    check_model_divisible,
    get_fixed_world_size,
    resolve_batching,
    resolve_layout,
)
from raytrain_hpc.planner.workload import make_workload
from raytrain_hpc.runtime.worker_spec import CustomModel, Script

# Of a model's shape, what may be another one than in the run that its first weights are from.
_INDEPENDENT_MODEL_KEYS = {"dropout", "init_std", "balance", "balance_weight", "balance_rate"}
_RAY_WORKING_DIRS = "working_dir_files"  # where Ray unpacks the --working-dir of a submitted job


@dataclass(frozen=True)
class PreparedRun:
    """A run whose settings, data, directory and checkpoint fit together."""

    config: Config
    model_spec: ModelSpec
    dataset: Dataset
    custom: CustomModel | Script | None
    directory: RunDirectory
    store: CheckpointStore
    stream: LocalStream  # for its data state; nothing is read here
    stored_batching: Batching | None = None  # how an earlier life of the run cut its batch
    init_checkpoint: Path | None = None  # the checkpoint whose weights it begins with

    def resolve_layout(self, world: int) -> tuple[Layout, Batching]:
        """Layout and microbatches on `world` ranks."""
        layout = resolve_layout(self.config, world)
        return layout, resolve_batching(self.config, layout, self.stored_batching)

    def estimate_comm_bytes(self, layout: Layout, batching: Batching) -> dict[str, float]:
        """Bytes a step along each axis of the mesh; of a module of the user's own nothing is known."""
        return (
            {} if self.custom else compute_bytes_by_axis(make_workload(self.config, self.model_spec), layout, batching)
        )

    def make_checkpoint_metadata(self, batching: Batching) -> Callable[[int], dict[str, Any]]:
        """What a checkpoint says of its run beside the tensors."""

        def of_step(step: int) -> dict[str, Any]:
            return self.build_identity() | {
                "microbatches": asdict(batching),
                "data_state": self.stream.get_state(step).to_json(),
                "positions": self.max_positions,
            }

        return of_step

    @property
    def max_positions(self) -> int:
        """That the model is made for: more than it is trained on, where it was imported."""
        wanted = self.config.model.max_positions
        return self.config.train.seq_len if wanted == AUTO else int(wanted)

    def build_identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to continue this run."""
        shape = None if self.custom else asdict(self.model_spec)
        train, data = self.config.train, self.config.data
        return {
            "model": shape,
            "dtype": train.dtype,
            "optimizer": train.optimizer,
            **({LORA_META_KEY: {"rank": train.lora_rank, "alpha": train.lora_alpha}} if train.lora_rank else {}),
            "data": {
                "seed": self.config.run.seed,
                "dataset_hash": self.dataset.dataset_hash,
                "order": data.order,
                "packing": data.packing,
            },
            "seq_len": train.seq_len,
        }


def prepare_run(config: Config, custom: CustomModel | Script | None, warn: Callable[[str], None]) -> PreparedRun:
    """Check settings against directory, data and checkpoints. Raises the error that a user should see, and leaves the
    disk as it was."""
    check_profiler(config.observe)
    check_trackers(config.observe)
    if config.train.lora_rank and find_spec("peft") is None:
        raise MissingDependencyError(f"train.lora_rank={config.train.lora_rank}: needs peft; run `pip install peft`")
    check_axes(config)
    world = get_fixed_world_size(config)
    if world is not None:
        resolve_batching(config, resolve_layout(config, world))
    directory = RunDirectory(Path(config.run.dir).absolute(), warn)
    store = CheckpointStore(directory.checkpoints)
    _check_directory(config, directory, store)
    wanted = None if config.model.vocab_size == "auto" else int(config.model.vocab_size)
    dataset = open_dataset(config.data, vocab_size=wanted, seed=config.run.seed)
    shape = resolve_model_spec(config.model, vocab_size=dataset.vocab_size, seq_len=config.train.seq_len)
    if custom is None:
        check_model_divisible(config, shape)
    else:
        _check_data_parallel(config)
        if isinstance(custom, Script):
            _check_replicated(config)
    stream = open_stream(
        dataset,
        config.data,
        seed=config.run.seed,
        seq_len=config.train.seq_len,
        global_batch=config.train.global_batch,
        micro_batch=1,
    )
    if _RAY_WORKING_DIRS in directory.path.parts:
        warn(
            f"warning: run.dir={config.run.dir} lies in Ray's copy of the working directory: Ray deletes it some time "
            "after the job, and no other node sees it; give an absolute path on a shared file system"
        )
    _warn_about_samples(dataset, stream, config, warn)
    prepared = PreparedRun(config, shape, dataset, custom, directory, store, stream)
    newest = find_newest_checkpoint(store, warn)
    if newest is None:
        return replace(prepared, init_checkpoint=_find_init_checkpoint(prepared, warn))
    _check_same_run(prepared, newest)
    stream.get_resume_step(DataState.from_json(newest.meta["data_state"]))
    prepared = replace(prepared, stored_batching=Batching(**newest.meta["microbatches"]))
    if world is not None:
        prepared.resolve_layout(world)
    return prepared


def _find_init_checkpoint(run: PreparedRun, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint that run.init_from names, if any. Raises CheckpointError where it is of another model, and
    DataError where it is of another tokenizer."""
    if not run.config.run.init_from:
        return None
    directory = RunDirectory(Path(run.config.run.init_from))
    found = find_newest_checkpoint(CheckpointStore(directory.checkpoints), warn)
    if found is None:
        raise CheckpointError(f"run.init_from={directory.path}: has no checkpoint any more")
    there, here = found.meta["model"], None if run.custom else asdict(run.model_spec)
    if there is not None and here is not None:
        there = asdict(ModelSpec(**there))
        for key in here.keys() - _INDEPENDENT_MODEL_KEYS:
            if there[key] != here[key]:
                remedy = f"the model in {directory.path} has {there[key]!r}; leave the key out"
                raise ConfigError(f"model.{key}", here[key], run.config.origin(f"model.{key}"), remedy)
    mine = run.dataset.tokenizer
    known = json.loads(directory.tokenizer.read_text()) if directory.tokenizer.exists() else None
    if mine is not None and known is not None and known != mine.to_json():
        raise DataError(
            f"data: its tokenizer is not that of the model in {directory.path}, whose tokens would mean something "
            f"else; prepare it with the model's own (hf:{directory.path / 'huggingface'} after import-hf)"
        )
    return found.path


def _warn_about_samples(dataset: Dataset, stream: LocalStream, config: Config, warn: Callable[[str], None]) -> None:
    """Say what a reader of the settings would not expect of the samples."""
    named = [source.path for source in config.data.sources] or [config.data.path]
    for path, source, size in zip(named, dataset.train, stream.source_sizes, strict=True):
        packing = build_packing(config.data.packing, config.train.seq_len)
        if size < stream.global_batch:
            warn(f"data: {path} has {size} samples, a step takes {stream.global_batch}: some repeat within a step")
        if isinstance(packing, PaddedPacking) and (cut := packing.count_truncated(source)):
            warn(
                f"data: {cut} of {source.num_documents} documents of {path} are longer than train.seq_len + 1 = "
                f"{config.train.seq_len + 1} tokens: what lies behind is not read"
            )


def _check_replicated(config: Config) -> None:
    if zero := config.parallel.zero:
        key = "parallel.zero"
        raise LayoutError(key, zero, config.origin(key), "a script's own optimizer needs whole parameters; set it to 0")


def _check_data_parallel(config: Config) -> None:
    if config.data.packing == "documents":
        key = "data.packing"
        remedy = "a model of your own is given tokens alone; use stream or padded"
        raise ConfigError(key, config.data.packing, config.origin(key), remedy)
    for axis in ("tp", "cp", "pp", "ep"):
        key, size = f"parallel.{axis}", getattr(config.parallel, axis)
        if size > 1:
            raise LayoutError(key, size, config.origin(key), "a model of your own trains data-parallel; set it to 1")
    if tile := config.parallel.tile_mib:
        key = "parallel.tile_mib"
        raise LayoutError(key, tile, config.origin(key), "a model of your own is gathered block by block; set it to 0")


def _check_directory(config: Config, directory: RunDirectory, store: CheckpointStore) -> None:
    check_writable(directory.path)
    Lease.check_available(directory.path)
    if config.run.resume == "never" and (store.list_steps() or directory.metrics.exists()):
        raise RunDirectoryError(
            f"run.dir={config.run.dir}: already holds a run and run.resume=never; choose another run.dir or name"
        )


def make_paths_absolute(config: Config) -> Config:
    """The settings with absolute paths, for processes whose current directory is another one."""
    moved = deepcopy(config)
    moved.run.dir = str(Path(config.run.dir).absolute())
    moved.data.path = _to_absolute(config.data.path)
    moved.data.preload = _to_absolute(config.data.preload)
    moved.parallel.offload_dir = _to_absolute(config.parallel.offload_dir)
    for source in moved.data.sources:
        source.path = _to_absolute(source.path)
    return moved


def _to_absolute(path: str) -> str:
    return path if path in ("", STDLIB, SYNTHETIC) or is_remote(path) else str(Path(path).expanduser().absolute())


def find_newest_checkpoint(store: CheckpointStore, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest valid checkpoint; damaged ones are reported and passed over. None where none was ever published.

    Raises CheckpointError where checkpoints exist and none is valid: starting over is the user's to decide.
    """
    damaged: list[str] = []

    def note(path: Path, reason: str) -> None:
        damaged.append(path.name)
        warn(f"damaged checkpoint passed over: {path}: {reason}")

    newest = store.find_newest_valid(note)
    if newest is None and damaged:
        raise CheckpointError(
            f"{store.root}: none of its checkpoints is valid ({', '.join(damaged)}); remove them to start over"
        )
    return newest


def _check_same_run(run: PreparedRun, checkpoint: Checkpoint) -> None:
    here = run.build_identity()
    for name, mine in here.items():
        there = checkpoint.meta.get(name)
        if name == "model" and there is not None:  # of before a shape had all that it has now
            there = asdict(ModelSpec(**there))
        if there == mine:
            continue
        what, old, new = _find_difference(name, there, mine)
        raise CheckpointError(
            f"{checkpoint.path}: belongs to another run: {what} is {old!r} there and {new!r} here; "
            "choose another run.dir, or set it back"
        )


def _find_difference(name: str, stored: Any, current: Any) -> tuple[str, Any, Any]:
    if isinstance(stored, dict) and isinstance(current, dict):
        for key in current:
            if stored.get(key) != current[key]:
                old, new = stored.get(key), current[key]
                if key.endswith("_hash"):
                    old, new = str(old)[:12], str(new)[:12]
                return f"{name}.{key}", old, new
    return name, stored, current
