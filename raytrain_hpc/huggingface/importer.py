"""Import of a Hugging Face model as a run directory with a checkpoint at step 0 (see imported_run.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.data.tokenizer.base import TokenizerSpec
from raytrain_hpc.data.tokenizer.registry import load_tokenizer
from raytrain_hpc.errors import ModelError
from raytrain_hpc.huggingface.atomic_dir import (
    GENERATION_CONFIG_FILE,
    SPECIAL_TOKEN_KEYS,
    atomic_directory,
    read_json,
)
from raytrain_hpc.huggingface.imported_run import (
    SHARD_BYTES,
    ImportedModel,
    ImportedTensor,
    copy_tokenizer_files,
    write_imported_run,
    write_tokenizer,
)
from raytrain_hpc.huggingface.model_configs import get_max_positions, parse_hf_config
from raytrain_hpc.huggingface.weight_mapping import IGNORED_SUFFIXES, WeightMapping, build_weight_mappings
from raytrain_hpc.state.shard_index import TensorSlices

_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class ImportResult:
    """Summary of an imported model."""

    model_spec: ModelSpec
    tokenizer_kind: str | None  # None if the source has no tokenizer.json


def import_model(source: str | Path, out: str | Path, *, shard_bytes: int = SHARD_BYTES) -> ImportResult:
    """Write the Hugging Face model in directory `source` as run directory `out`, with fp32 weights.

    Only one tensor is held in memory at a time. Raises ModelError if the decoder does not support the model or its
    files do not match its config.json, and CheckpointError if `out` exists or cannot be written.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    config = read_json(source / "config.json")
    spec = parse_hf_config(config)
    max_positions, mappings = get_max_positions(config), build_weight_mappings(spec)
    locations = _locate_tensors(source, spec, mappings)
    tensors = [
        ImportedTensor(
            TensorSlices(f"model.{mapping.name}", mapping.shape, "float32", (mapping.box,)),
            partial(_read_tensor, mapping, locations),
        )
        for mapping in mappings
    ]
    model = ImportedModel(spec, max_positions, "config.json")
    with atomic_directory(out) as directory:
        tokenizer_kind = _import_tokenizer(source, directory, config)
        write_imported_run(directory, out, model, tensors, imported_from=source, shard_bytes=shard_bytes)
    return ImportResult(spec, tokenizer_kind)


def _locate_tensors(source: Path, spec: ModelSpec, mappings: Sequence[WeightMapping]) -> dict[str, tuple[Path, str]]:
    """Return the file of every tensor and its name there, by `WeightMapping.hf_name`."""
    locations = {name: (path, name) for path in _list_weight_files(source) for name in _list_tensor_names(path)}
    if spec.position_embedding == "learned" and not any(name.startswith("transformer.") for name in locations):
        locations = {f"transformer.{name}": location for name, location in locations.items()}  # saved without head
    expected = {mapping.hf_name for mapping in mappings}
    if missing := sorted(expected - locations.keys()):
        raise ModelError(
            f"{source}: the files lack {missing[0]} and {len(missing) - 1} more of {len(expected)} tensors"
        )
    tied = {"lm_head.weight"} if spec.tie_embeddings else set()
    unknown = sorted(name for name in locations.keys() - expected - tied if not name.endswith(IGNORED_SUFFIXES))
    if unknown:
        raise ModelError(f"{source}: {unknown[0]} does not belong to the model of its config.json")
    return locations


def _list_weight_files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise ModelError(f"{index}: has no weight_map")
        return [source / Path(name).name for name in sorted(set(weight_map.values()))]
    if (single := source / "model.safetensors").is_file():  # others beside it repeat its weights in another format
        return [single]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{source}: holds no .safetensors file, and pickles are never loaded because they can run code; save the "
            "model again with save_pretrained(DIR, safe_serialization=True)"
        )
    return files


def _list_tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _read_tensor(mapping: WeightMapping, locations: Mapping[str, tuple[Path, str]]) -> torch.Tensor:
    path, name = locations[mapping.hf_name]
    with safe_open(path, framework="pt", device="cpu") as file:
        tensor = file.get_tensor(name)  # a view of the memory-mapped file
    if tuple(tensor.shape) != mapping.hf_shape or tensor.dtype not in _FLOAT_DTYPES:
        actual = f"{tensor.dtype} {list(tensor.shape)}"
        raise ModelError(f"{path}: {name} is {actual}; config.json implies {list(mapping.hf_shape)}")
    return mapping.to_native(tensor.to(torch.float32))


def _import_tokenizer(source: Path, directory: Path, config: Mapping[str, Any]) -> str | None:
    """Copy the tokenizer files and the special token ids; return the tokenizer's kind, or None without one."""
    imported_dir = copy_tokenizer_files(source, directory)
    if not (imported_dir / GENERATION_CONFIG_FILE).exists():
        special_token_ids = {key: config[key] for key in SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        (imported_dir / GENERATION_CONFIG_FILE).write_text(json.dumps(special_token_ids, indent=2) + "\n")
    if not (imported_dir / "tokenizer.json").exists():
        return None
    return write_tokenizer(directory, load_tokenizer(TokenizerSpec("hf", str(source))))
