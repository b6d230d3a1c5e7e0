"""Export of a run's checkpoint, saved on any layout, as a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import yaml

from raytrain_hpc.checkpoint.averaged_weights import select_averaged_weights
from raytrain_hpc.checkpoint.manifest import HF_CONFIG_KEY, Checkpoint
from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.safetensors_writer import TensorEntry, write_tensors
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.data.tokenizer.hf_files import build_tokenizer_files
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.driver.run_directory import RunDirectory, read_run_directory
from raytrain_hpc.errors import CheckpointError, ModelError
from raytrain_hpc.huggingface.atomic_dir import (
    GENERATION_CONFIG_FILE,
    PASSTHROUGH_FILES,
    SPECIAL_TOKEN_KEYS,
    atomic_directory,
    read_json,
)
from raytrain_hpc.huggingface.imported_run import IMPORTED_DIR
from raytrain_hpc.huggingface.model_configs import build_hf_config, get_family
from raytrain_hpc.huggingface.weight_mapping import WeightMapping, build_weight_mappings
from raytrain_hpc.state.shard_index import ITEM_BYTES
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard
from raytrain_hpc.storage.location import Location, parse_location

SHARD_BYTES = 4 << 30
EXPORT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ExportResult:
    """Summary of an exported model directory."""

    step: int
    family: str  # of the built-in decoder, or model_type of transformers
    weight_files: tuple[str, ...]
    has_tokenizer: bool


def export_model(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | str | None = None,
    weights: Literal["averaged", "trained"] = "averaged",
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ExportResult:
    """Write a checkpoint of a run as Hugging Face model directory `out`.

    LoRA adapters are merged into the weights. Only one tensor is held in memory at a time.

    Args:
        run_dir: Run directory.
        out: Directory to create; must not exist, or be empty.
        step: Step or label of the checkpoint. The default is the newest valid one.
        weights: averaged: those that a callback such as `EMA` has averaged, if there are any; trained: the last ones.
        dtype: float32, bfloat16, float16 or float64. The default is the dtype of the checkpoint.
        shard_bytes: Maximum size of a weight file.

    Raises CheckpointError if there is no such checkpoint or `out` exists, and ModelError if the model belongs to no
    supported family or a weight overflows `dtype`.
    """
    source, out = read_run_directory(run_dir), Path(out).expanduser()
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise ModelError(f"export: dtype={dtype!r}: known are {', '.join(EXPORT_DTYPES)}")
    checkpoint = _find_checkpoint(source, step)
    if weights == "averaged":
        checkpoint = select_averaged_weights(checkpoint)
    if checkpoint.meta.get(HF_CONFIG_KEY) is not None:
        return _export_transformers_model(source, out, checkpoint, dtype)
    spec = ModelSpec.from_json(checkpoint.meta["model"])
    mappings = build_weight_mappings(spec)
    stored_dtype = checkpoint.index[f"model.{mappings[0].name}"].dtype
    dtype = stored_dtype if dtype is None else dtype
    max_positions = int(checkpoint.meta.get("positions", checkpoint.meta["seq_len"]))
    with atomic_directory(out) as directory:
        special_token_ids = _write_tokenizer(source, directory, max_positions)
        config = build_hf_config(spec, max_positions, dtype, special_token_ids)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if not (directory / GENERATION_CONFIG_FILE).exists():
            generation_config = {
                "_from_model_config": True,
                **{key: token_id for key, token_id in special_token_ids.items() if token_id is not None},
            }
            (directory / GENERATION_CONFIG_FILE).write_text(json.dumps(generation_config, indent=2) + "\n")
        weight_files = _write_weights(directory, checkpoint, mappings, dtype, shard_bytes)
        has_tokenizer = (directory / "tokenizer.json").exists()
    return ExportResult(checkpoint.step, get_family(spec), weight_files, has_tokenizer)


def _export_transformers_model(
    source: RunDirectory, out: Path, checkpoint: Checkpoint, dtype: str | None
) -> ExportResult:
    from raytrain_hpc.huggingface.transformers_exporter import write_transformers_model  # imports transformers

    with atomic_directory(out) as directory:
        _write_tokenizer(source, directory, int(checkpoint.meta["seq_len"]))
        model_type = write_transformers_model(checkpoint, directory, dtype)
        weight_files = tuple(sorted(path.name for path in directory.glob("*.safetensors")))
        has_tokenizer = (directory / "tokenizer.json").exists()
    return ExportResult(checkpoint.step, model_type, weight_files, has_tokenizer)


def _find_checkpoint(directory: RunDirectory, step: int | str | None) -> Checkpoint:
    checkpoint = CheckpointStore(directory.checkpoints).find(step)
    if checkpoint is None:
        raise CheckpointError(f"{directory.location}: no valid checkpoint; train first")
    if checkpoint.meta["model"] is None and checkpoint.meta.get(HF_CONFIG_KEY) is None:
        remedy = "only the built-in decoder can be exported; load its weights with raytrain_hpc.load_weights"
        raise CheckpointError(f"{checkpoint.path}: holds a custom model; {remedy}")
    return checkpoint


def _write_weights(
    directory: Path, checkpoint: Checkpoint, mappings: Sequence[WeightMapping], dtype: str, shard_bytes: int
) -> tuple[str, ...]:
    """Write the weight files, and an index if there are several; return their names."""
    groups = _group_into_shards(mappings, ITEM_BYTES[dtype], shard_bytes)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups, strict=True):
        entries = [TensorEntry(mapping.hf_name, dtype, mapping.hf_shape) for mapping in group]
        write_tensors(directory / name, entries, _read_tensors(checkpoint, group, dtype), {"format": "pt"})
    if len(groups) > 1:
        size = sum(mapping.numel for mapping in mappings) * ITEM_BYTES[dtype]
        weight_map = {mapping.hf_name: name for name, group in zip(names, groups, strict=True) for mapping in group}
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return tuple(names)


def _group_into_shards(
    mappings: Sequence[WeightMapping], item_bytes: int, shard_bytes: int
) -> list[list[WeightMapping]]:
    groups: list[list[WeightMapping]] = []
    size = shard_bytes
    for mapping in mappings:
        if size + mapping.numel * item_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(mapping)
        size += mapping.numel * item_bytes
    return groups


def _read_tensors(checkpoint: Checkpoint, group: Sequence[WeightMapping], dtype: str) -> Iterator[torch.Tensor]:
    for mapping in group:
        name = f"model.{mapping.name}"
        stored_dtype = checkpoint.index[name].dtype
        hf_tensor = torch.empty(mapping.hf_shape, dtype=TORCH_DTYPES[stored_dtype])
        read_merged_state(
            checkpoint,
            ShardedState([StateShard(name, mapping.shape, stored_dtype, mapping.box, mapping.to_native(hf_tensor))]),
        )
        tensor = hf_tensor.to(TORCH_DTYPES[dtype])
        if dtype == "float16" and not bool(tensor.isfinite().all()):
            raise ModelError(f"export: {mapping.hf_name} has values that float16 cannot hold; use bfloat16 or float32")
        yield tensor


def _read_init_from(run_dir: Location) -> str:
    """Return the setting run.init_from of a run; "" if there is none, or no valid config.yaml. Raises OSError."""
    try:
        settings = yaml.safe_load((run_dir / "config.yaml").read_bytes())
        return str(settings["run"]["init_from"] or "")
    except (FileNotFoundError, NotADirectoryError, yaml.YAMLError, KeyError, TypeError):
        return ""


def _write_tokenizer(source: RunDirectory, directory: Path, max_positions: int) -> dict[str, Any]:
    """Write the run's tokenizer files and return its special token ids.

    The files of an imported model are copied if the run has the same tokenizer, or none.
    """
    tokenizer_files: dict[str, str] = {}
    special_token_ids: dict[str, Any] = {}
    has_tokenizer = source.tokenizer.exists()
    if has_tokenizer:
        tokenizer = tokenizer_from_json(read_json(source.tokenizer))
        tokenizer_files, special_token_ids = (
            build_tokenizer_files(tokenizer, max_positions),
            {"eos_token_id": tokenizer.end_of_text},
        )
        for name, text in tokenizer_files.items():
            (directory / name).write_text(text)
    imported = _read_imported_files(source.location)
    if has_tokenizer and tokenizer_files.get("tokenizer.json", "").encode() != imported.get("tokenizer.json"):
        return special_token_ids
    for name, content in imported.items():
        (directory / name).write_bytes(content)
    if GENERATION_CONFIG_FILE in imported:  # of import-hf
        generation_config = read_json(directory / GENERATION_CONFIG_FILE)
        special_token_ids |= {key: generation_config[key] for key in SPECIAL_TOKEN_KEYS if key in generation_config}
    return special_token_ids


def _read_imported_files(run_dir: Location) -> dict[str, bytes]:
    """Return the imported files of the model that run.init_from, followed through other runs, names; {} if none are.

    Raises CheckpointError for a directory that cannot be read.
    """
    visited: set[Location] = set()
    while run_dir not in visited:
        visited.add(run_dir)
        try:
            paths = [path for name in PASSTHROUGH_FILES if (path := run_dir / IMPORTED_DIR / name).is_file()]
            if paths:
                return {path.name: path.read_bytes() for path in paths}
            init_from = _read_init_from(run_dir)
            if not init_from:
                return {}
            run_dir = parse_location(init_from)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{run_dir}: cannot be read: {getattr(error, 'strerror', '') or error}") from error
    return {}
