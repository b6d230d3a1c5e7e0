"""Preparation and validation of a run, before a cluster is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease, check_writable
from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.manifest import HF_CONFIG_KEY, LORA_META_KEY, Checkpoint
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.checkpoint.verification import check_checkpoint, verify_checkpoint
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec
from raytrain_hpc.config.parameter_groups import check_patterns
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.config.training_config import OPTIMIZER_NAMES
from raytrain_hpc.data.dataset.sources import STDLIB, SYNTHETIC, Dataset
from raytrain_hpc.data.dataset.storage import is_remote
from raytrain_hpc.data.loader.eval_set import check_targets
from raytrain_hpc.data.loader.packing import PaddedPacking, build_packing
from raytrain_hpc.data.loader.stream import DataState, LocalStream, open_stream
from raytrain_hpc.data.samples.sample_dataset import SampleDataset, SampleStream
from raytrain_hpc.driver.dataset_opening import open_configured_dataset
from raytrain_hpc.driver.resume_check import check_resumable
from raytrain_hpc.driver.run_directory import RunDirectory, open_run_directory, read_run_directory
from raytrain_hpc.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
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
from raytrain_hpc.ray_private import is_working_dir_copy
from raytrain_hpc.runtime.worker_spec import CustomModel, Script
from raytrain_hpc.storage.location import Location, make_absolute

# Fields of the model spec that may differ from those of the run in run.init_from.
_INDEPENDENT_MODEL_KEYS = {"dropout", "init_std", "load_balancing", "load_balancing_weight", "expert_bias_rate"}


@dataclass(frozen=True)
class PreparedRun:
    """A run whose settings, data, run directory and newest checkpoint are consistent."""

    config: Config
    model_spec: ModelSpec
    dataset: Dataset | SampleDataset
    custom: CustomModel | Script | None
    directory: RunDirectory
    store: CheckpointStore
    stream: LocalStream | SampleStream  # for its data state; the driver reads no data
    newest_checkpoint: Checkpoint | None = None  # in the run directory
    stored_batching: Batching | None = None  # the split of the batch when the run first started
    init_checkpoint: Location | None = None  # the checkpoint that provides the initial weights

    @property
    def local_catalog(self) -> LocalCatalog | None:
        """The catalog of the run's checkpoints in node-local storage; None without `checkpoint.local_dir`."""
        has_local = bool(self.config.checkpoint.local_dir)
        return LocalCatalog(self.directory.location, self.store.find_distrust) if has_local else None

    def resolve_layout(self, world: int) -> tuple[Layout, Batching]:
        """Return layout and microbatches on `world` ranks. Raises LayoutError if the layout is not legal."""
        layout = resolve_layout(self.config, world)
        return layout, resolve_batching(self.config, layout, self.stored_batching)

    def estimate_comm_bytes(self, layout: Layout, batching: Batching) -> dict[str, float]:
        """Return the bytes per step along each mesh axis; empty for a user-supplied module."""
        return (
            {} if self.custom else compute_bytes_by_axis(make_workload(self.config, self.model_spec), layout, batching)
        )

    def make_checkpoint_metadata(self, batching: Batching) -> Callable[[int], dict[str, Any]]:
        """Return a function that gives the metadata of the checkpoint of a step."""

        def metadata_of_step(step: int) -> dict[str, Any]:
            return self.build_identity() | {
                "microbatches": asdict(batching),
                "data_state": self.stream.get_state(step).to_json(),
                "positions": self.max_positions,
            }

        return metadata_of_step

    @property
    def max_positions(self) -> int:
        """The number of positions that the model supports, which can exceed train.seq_len."""
        max_positions = self.config.model.max_positions
        return self.config.train.seq_len if max_positions == AUTO else int(max_positions)

    def build_identity(self) -> dict[str, Any]:
        """Return the properties that a checkpoint must share to resume this run."""
        model_spec = None if self.custom else asdict(self.model_spec)
        train, data, lora, optimizer = self.config.train, self.config.data, self.config.lora, self.config.optimizer
        return {
            "model": model_spec,
            "dtype": train.dtype,
            "optimizer": optimizer.name,
            **({"optimizer.args": optimizer.args} if optimizer.name not in OPTIMIZER_NAMES else {}),
            **({"optimizer.groups": [asdict(group) for group in optimizer.groups]} if optimizer.groups else {}),
            **({HF_CONFIG_KEY: self.custom.hf_config} if isinstance(self.custom, CustomModel) else {}),
            **({LORA_META_KEY: {"rank": lora.rank, "alpha": lora.alpha}} if lora.rank else {}),
            "data": {
                "seed": self.config.run.seed,
                "dataset_hash": self.dataset.dataset_hash,
                "order": data.order,
                "packing": data.packing,
            },
            "seq_len": train.seq_len,
        }


def prepare_run(config: Config, custom: CustomModel | Script | None, warn: Callable[[str], None]) -> PreparedRun:
    """Check the settings against run directory, data and checkpoints, and return the run.

    Call before the cluster is used. Nothing is written. Raises the RaytrainError that the user should see.
    """
    check_profiler(config.profiler)
    check_trackers(config)
    check_axes(config)
    world = get_fixed_world_size(config)
    if world is not None:
        resolve_batching(config, resolve_layout(config, world))
    directory = open_run_directory(make_absolute(config.run.dir), warn)
    store = CheckpointStore(directory.checkpoints)
    _check_directory(config, directory, store, warn)
    dataset = _get_own_dataset(custom) or open_configured_dataset(config)
    model_spec = resolve_model_spec(config.model, vocab_size=dataset.vocab_size, seq_len=config.train.seq_len)
    check_optimizer(config, custom)
    _check_group_patterns(config, custom, model_spec)
    if custom is None:
        check_model_divisible(config, model_spec)
    else:
        _check_data_parallel(config, custom)
        if isinstance(custom, CustomModel) and custom.hf_config is not None:
            _check_vocabulary(config, custom.hf_config, dataset.vocab_size)
    stream = _open_stream(config, dataset)
    if isinstance(directory.location, Path) and is_working_dir_copy(directory.location):
        warn(
            f"warning: run.dir={config.run.dir} lies in Ray's copy of the working directory: Ray deletes it some time "
            "after the job, and no other node sees it; give an absolute path on a shared file system"
        )
    _warn_about_samples(dataset, stream, config, warn)
    prepared = PreparedRun(config, model_spec, dataset, custom, directory, store, stream)
    in_run_directory = find_newest_checkpoint(store, warn, check_checkpoint)
    if in_run_directory is not None and in_run_directory.step >= config.train.steps:  # no rank will read it
        in_run_directory = find_newest_checkpoint(store, warn)
    if in_run_directory is None:
        prepared = replace(prepared, init_checkpoint=_find_init_checkpoint(prepared, warn))
    newest = _find_newest_manifest(prepared, in_run_directory)
    if newest is None:
        return prepared
    if config.train.dtype == AUTO:  # a run keeps the type that it started with, whatever hardware it resumes on
        config = copy(config)
        config.train = replace(config.train, dtype=newest.meta["dtype"])
        config.origins = config.origins | {"train.dtype": str(newest.path)}
        prepared = replace(prepared, config=config)
    check_resumable(config, prepared.build_identity(), directory, newest)
    stream.get_resume_step(DataState.from_json(newest.meta["data_state"]))
    stored_batching = Batching(**newest.meta["microbatches"])
    prepared = replace(prepared, newest_checkpoint=in_run_directory, stored_batching=stored_batching)
    if world is not None:
        prepared.resolve_layout(world)
    return prepared


def _find_newest_manifest(run: PreparedRun, in_run_directory: Checkpoint | None) -> Checkpoint | None:
    """Return the newest checkpoint, in run.dir or on nodes, which may not be there any more. For its metadata only."""
    catalog = run.local_catalog
    for name in reversed([] if catalog is None else catalog.list_names()):
        with suppress(CheckpointCorruptedError):  # reported when a checkpoint to resume from is looked for
            checkpoint = LocalCatalog(run.directory.location).read(name)
            return in_run_directory if in_run_directory and in_run_directory.step >= checkpoint.step else checkpoint
    return in_run_directory


def _get_own_dataset(custom: CustomModel | Script | None) -> SampleDataset | None:
    """Return the user's dataset, or None if the run reads token shards."""
    dataset = custom.dataset if isinstance(custom, CustomModel) else None
    return dataset if isinstance(dataset, SampleDataset) else None


def _open_stream(config: Config, dataset: Dataset | SampleDataset) -> LocalStream | SampleStream:
    """Return the stream of the training data. Raises DataError for invalid sizes, or validation without targets."""
    if isinstance(dataset, SampleDataset):
        if dataset.form == "map":
            dataset.open_order(config, 1)
        return SampleStream(dataset, config.run.seed, config.train.global_batch_size)
    seq_len, batch_size = config.train.seq_len, config.train.global_batch_size
    options = {"seed": config.run.seed, "seq_len": seq_len, "global_batch_size": batch_size}
    stream = open_stream(dataset, config.data, **options, micro_batch_size=1)
    if dataset.val is not None:  # after the check whether it can be packed so
        check_targets(dataset.val, build_packing(config.data.packing, seq_len), config.eval.samples)
    return stream


def _find_init_checkpoint(run: PreparedRun, warn: Callable[[str], None]) -> Location | None:
    """Return the checkpoint that run.init_from names, or None if it is not set.

    Raises CheckpointError if there is none, ConfigError if its model differs, and DataError if its tokenizer differs.
    """
    if not run.config.run.init_from:
        return None
    directory = read_run_directory(run.config.run.init_from)
    checkpoint = find_newest_checkpoint(CheckpointStore(directory.checkpoints), warn)
    if checkpoint is None:
        raise CheckpointError(
            f"run.init_from={directory.location}: has no checkpoint; choose another run or checkpoint"
        )
    init_model, model = checkpoint.meta["model"], None if run.custom else asdict(run.model_spec)
    if init_model is not None and model is not None:
        init_model = asdict(ModelSpec.from_json(init_model))
        for key in model.keys() - _INDEPENDENT_MODEL_KEYS:
            if init_model[key] != model[key]:
                remedy = f"the model in {directory.location} has {init_model[key]!r}; leave the key out"
                raise ConfigError(f"model.{key}", model[key], run.config.origin(f"model.{key}"), remedy)
    tokenizer = run.dataset.tokenizer
    init_tokenizer = json.loads(directory.tokenizer.read_text()) if directory.tokenizer.exists() else None
    if tokenizer is not None and init_tokenizer is not None and init_tokenizer != tokenizer.to_json():
        raise DataError(
            f"data: its tokenizer differs from that of the model in {directory.location}; prepare it with the model's "
            f"own tokenizer (hf:{directory.path / 'huggingface'} after import-hf)"
        )
    return checkpoint.path


def _warn_about_samples(
    dataset: Dataset | SampleDataset,
    stream: LocalStream | SampleStream,
    config: Config,
    warn: Callable[[str], None],
) -> None:
    """Warn if samples repeat within a step, or if padded samples lose tokens of long documents."""
    if isinstance(dataset, SampleDataset):
        if stream.source_sizes and stream.source_sizes[0] < stream.global_batch_size:
            warn(
                f"dataset: it has {stream.source_sizes[0]} samples, a step takes {stream.global_batch_size}; some "
                "repeat within a step"
            )
        return
    paths = [source.path for source in config.data.sources] or [config.data.path]
    for path, source, num_samples in zip(paths, dataset.train, stream.source_sizes, strict=True):
        packing = build_packing(config.data.packing, config.train.seq_len)
        if num_samples < stream.global_batch_size:
            warn(
                f"data: {path} has {num_samples} samples, a step takes {stream.global_batch_size}; some repeat "
                "within a step"
            )
        if isinstance(packing, PaddedPacking) and (num_truncated := packing.count_truncated(source)):
            warn(
                f"data: {num_truncated} of {source.num_documents} documents of {path} are longer than "
                f"train.seq_len + 1 = {config.train.seq_len + 1} tokens; the remaining tokens are not used"
            )


def check_optimizer(config: Config, custom: CustomModel | Script | None) -> None:
    """Raise ConfigError if an optimizer class cannot be used. Does nothing for a script, whose optimizer is its own."""
    if config.optimizer.name not in OPTIMIZER_NAMES and not isinstance(custom, Script):
        from raytrain_hpc.optim.optimizer_class import check_optimizer_class  # torch, which the driver needs only here

        check_optimizer_class(config)


def _check_group_patterns(config: Config, custom: CustomModel | Script | None, model_spec: ModelSpec) -> None:
    """Raise ConfigError for a pattern of optimizer.groups that the built-in decoder has no parameter for."""
    if config.optimizer.groups and custom is None:
        from raytrain_hpc.training.optimizer_builder import list_decoder_parameters

        check_patterns(config, list_decoder_parameters(model_spec, config.lora))


def _check_vocabulary(config: Config, hf_config: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ConfigError if a transformers model has fewer tokens than the dataset."""
    known = hf_config.get("vocab_size") or hf_config.get("text_config", {}).get("vocab_size") or vocab_size
    if known < vocab_size:
        remedy = f"its vocabulary has {known} tokens, that of the dataset {vocab_size}; use the model's tokenizer"
        raise ConfigError("model.hf", config.model.hf, config.origin("model.hf"), remedy)


def _get_refused_axes(custom: CustomModel | Script) -> dict[str, str]:
    """Return the axes that a user-supplied model cannot have, with the reason."""
    reasons = {
        "cp": "only the built-in decoder's attention can be split over the positions of a sequence",
        "pp": "only the built-in decoder can be split into stages: the order of other layers is in their model's code",
        "ep": "only the built-in decoder's experts can be placed on different ranks",
    }
    if isinstance(custom, Script) or custom.plan is None:
        reasons["tp"] = "a user-supplied model needs a plan for tensor parallelism: pass rt.train(plan={path: style})"
    return reasons


def _check_data_parallel(config: Config, custom: CustomModel | Script) -> None:
    """Raise ConfigError or LayoutError if the settings need more of a user-supplied model than it has."""
    is_transformers = isinstance(custom, CustomModel) and custom.hf_config is not None
    if config.data.packing == "documents" and not is_transformers:
        key = "data.packing"
        remedy = "a user-supplied model receives tokens only; use stream or padded"
        raise ConfigError(key, config.data.packing, config.origin(key), remedy)
    if isinstance(custom, Script) and (interval := config.fault.audit_interval):
        key = "fault.audit_interval"
        remedy = "the platform cannot run the body of a script's loop for a microbatch of another rank; set it to 0"
        raise ConfigError(key, interval, config.origin(key), remedy)
    for axis, reason in _get_refused_axes(custom).items():
        key, size = f"parallel.{axis}", getattr(config.parallel, axis)
        if size > 1:
            raise LayoutError(key, size, config.origin(key), f"{reason}; set it to 1")
    if rank := config.lora.rank:
        key = "lora.rank"
        raise LayoutError(
            key, rank, config.origin(key), "LoRA adapts the layers of the built-in decoder; set it to 0 and adapt yours"
        )
    if config.train.dtype == "float8":
        key, remedy = "train.dtype", "float8 is for the layers of the built-in decoder; use bf16"
        raise ConfigError(key, config.train.dtype, config.origin(key), remedy)
    if tile := config.parallel.tile_mib:
        key = "parallel.tile_mib"
        raise LayoutError(
            key, tile, config.origin(key), "a user-supplied model is gathered block by block; set it to 0"
        )


def _check_directory(
    config: Config, directory: RunDirectory, store: CheckpointStore, print_line: Callable[[str], None]
) -> None:
    """Raise RunDirectoryError if the directory is not writable, in use, or holds a run that must not be resumed.

    Wait if it may be in use by a driver that has died with its host.
    """
    check_writable(directory.location)
    Lease.wait_until_available(directory.location, print_line)
    if config.run.resume == "never" and (store.list_steps() or directory.metrics.exists()):
        raise RunDirectoryError(
            f"run.dir={config.run.dir}: already holds a run and run.resume=never; choose another run.dir or name"
        )


def make_paths_absolute(config: Config) -> Config:
    """Return a copy of the settings with absolute paths, for processes with another working directory."""
    result = deepcopy(config)
    result.run.dir = make_absolute(config.run.dir)
    result.data.path = _to_absolute(config.data.path)
    result.data.local_cache = _to_absolute(config.data.local_cache)
    result.parallel.offload_dir = _to_absolute(config.parallel.offload_dir)
    for source in result.data.sources:
        source.path = _to_absolute(source.path)
    return result


def _to_absolute(path: str) -> str:
    return path if path in ("", STDLIB, SYNTHETIC) or is_remote(path) else str(Path(path).expanduser().absolute())


def find_newest_checkpoint(
    store: CheckpointStore,
    warn: Callable[[str], None],
    check: Callable[[Location], Checkpoint] = verify_checkpoint,
) -> Checkpoint | None:
    """Return the newest valid checkpoint, or None if none was ever published. Corrupted ones are reported and skipped.

    `check`: see `CheckpointStore.find_newest_valid`.

    Raises CheckpointCorruptedError if checkpoints exist but none is valid: the user decides whether to start over. If
    none is trusted because nothing after the start of the run is known to be right, it starts over: returns None.
    """
    damaged, untrusted = list[str](), list[str]()

    def report(names: list[str], what: str, path: Location, reason: str) -> None:
        names.append(path.name)
        warn(f"{what} skipped: {path}: {reason}")

    newest = store.find_newest_valid(
        partial(report, damaged, "damaged checkpoint"), check, partial(report, untrusted, "checkpoint")
    )
    if newest is None and (damaged or (untrusted and not store.is_only_start_trusted())):
        names = ", ".join([*damaged, *untrusted])
        raise CheckpointCorruptedError(
            f"{store.root}: none of its checkpoints is valid ({names}); remove them to start over"
        )
    return newest
