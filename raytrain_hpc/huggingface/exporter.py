"""A run's newest checkpoint, of whatever layout, as a directory that Hugging Face's libraries load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from raytrain_hpc.checkpoint.manifest import Checkpoint
from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.safetensors_writer import TensorEntry, write_tensors
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.data.tokenizer.hf_files import build_tokenizer_files
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.errors import CheckpointError, ModelError
from raytrain_hpc.huggingface.atomic_dir import (
    GENERATION_CONFIG_FILE,
    PASSTHROUGH_FILES,
    SPECIAL_TOKEN_KEYS,
    atomic_directory,
    read_json,
)
from raytrain_hpc.huggingface.model_configs import Family, build_hf_config, get_family
from raytrain_hpc.huggingface.weight_mapping import WeightMapping, build_weight_mappings
from raytrain_hpc.state.shard_index import ITEM_BYTES
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard

SHARD_BYTES = 4 << 30
EXPORT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    step: int
    family: Family
    weight_files: tuple[str, ...]  # of weights
    has_tokenizer: bool


def export_model(
    run_dir: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> ExportResult:
    """Write the checkpoint of `step` (the newest valid one) as directory `out`, weights as `dtype` (as they are).

    One tensor at a time is in memory. Raises CheckpointError where the run has no such checkpoint or `out` exists, and
    ModelError where no family of models there has this shape.
    """
    run_dir, out = Path(run_dir).expanduser(), Path(out).expanduser()
    checkpoint = _find_checkpoint(run_dir, step)
    shape = ModelSpec(**checkpoint.meta["model"])
    twins = build_weight_mappings(shape)
    stored = checkpoint.index[f"model.{twins[0].name}"].dtype
    dtype = stored if dtype is None else dtype
    if dtype not in EXPORT_DTYPES:
        raise ModelError(f"export: dtype={dtype!r}: known are {', '.join(EXPORT_DTYPES)}")
    positions = int(checkpoint.meta.get("positions", checkpoint.meta["seq_len"]))
    with atomic_directory(out) as directory:
        ends = _write_tokenizer(run_dir, directory, positions)
        config = build_hf_config(shape, positions, dtype, ends)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if not (directory / GENERATION_CONFIG_FILE).exists():
            said = {"_from_model_config": True, **{key: end for key, end in ends.items() if end is not None}}
            (directory / GENERATION_CONFIG_FILE).write_text(json.dumps(said, indent=2) + "\n")
        files = _write_weights(directory, checkpoint, twins, dtype, shard_bytes)
        tokenizer = (directory / "tokenizer.json").exists()
    return ExportResult(checkpoint.step, get_family(shape), files, tokenizer)


def _find_checkpoint(run_dir: Path, step: int | None) -> Checkpoint:
    store = CheckpointStore(run_dir / "checkpoints")
    found = store.find_newest_valid(lambda path, reason: None) if step is None else store.verify(step)
    if found is None:
        raise CheckpointError(f"{run_dir}: no valid checkpoint; train first")
    if found.meta["model"] is None:
        raise CheckpointError(f"{found.path}: a module of the caller's own; no family of models there is known to fit")
    return found


def _write_weights(
    directory: Path, checkpoint: Checkpoint, mappings: Sequence[WeightMapping], dtype: str, shard_bytes: int
) -> tuple[str, ...]:
    """The files of weights, and an index where there are several."""
    groups = _group_into_shards(mappings, ITEM_BYTES[dtype], shard_bytes)
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else ["model.safetensors"]
    for name, group in zip(names, groups, strict=True):
        entries = [TensorEntry(twin.hf_name, dtype, twin.hf_shape) for twin in group]
        write_tensors(directory / name, entries, _read_tensors(checkpoint, group, dtype), {"format": "pt"})
    if len(groups) > 1:
        size = sum(twin.numel for twin in mappings) * ITEM_BYTES[dtype]
        where = {twin.hf_name: name for name, group in zip(names, groups, strict=True) for twin in group}
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return tuple(names)


def _group_into_shards(
    mappings: Sequence[WeightMapping], item_bytes: int, shard_bytes: int
) -> list[list[WeightMapping]]:
    groups: list[list[WeightMapping]] = []
    size = shard_bytes
    for twin in mappings:
        if size + twin.numel * item_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(twin)
        size += twin.numel * item_bytes
    return groups


def _read_tensors(checkpoint: Checkpoint, group: Sequence[WeightMapping], dtype: str) -> Iterator[torch.Tensor]:
    for twin in group:
        name = f"model.{twin.name}"
        stored = checkpoint.index[name].dtype
        theirs = torch.empty(twin.hf_shape, dtype=TORCH_DTYPES[stored])
        read_merged_state(
            checkpoint, ShardedState([StateShard(name, twin.shape, stored, twin.box, twin.to_native(theirs))])
        )
        given = theirs.to(TORCH_DTYPES[dtype])
        if dtype == "float16" and not bool(given.isfinite().all()):
            raise ModelError(f"export: {twin.hf_name} has values that float16 cannot hold; use bfloat16 or float32")
        yield given


def _read_settings(run_dir: Path) -> dict[str, dict[str, object]]:
    """The run's settings as they were written; without them an export says less."""
    try:
        found = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_tokenizer(run_dir: Path, directory: Path, positions: int) -> dict[str, Any]:
    """Write the run's tokenizer; the ids of its special tokens.

    Where it is the one of the model that the run started from, or none is known, that model's own files are passed on.
    """
    stored, kept = run_dir / "tokenizer.json", _find_imported_files(run_dir)
    made: dict[str, str] = {}
    ends: dict[str, Any] = {}
    if stored.exists():
        tokenizer = tokenizer_from_json(read_json(stored))
        made, ends = build_tokenizer_files(tokenizer, positions), {"eos_token_id": tokenizer.end_of_text}
        for name, text in made.items():
            (directory / name).write_text(text)
    if kept is None or (stored.exists() and made.get("tokenizer.json") != _read_text(kept / "tokenizer.json")):
        return ends
    for name in PASSTHROUGH_FILES:
        if (kept / name).exists():
            shutil.copyfile(kept / name, directory / name)
    said = read_json(kept / GENERATION_CONFIG_FILE)
    return ends | {key: said[key] for key in SPECIAL_TOKEN_KEYS if key in said}


def _read_text(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _find_imported_files(run_dir: Path) -> Path | None:
    """What was imported with the model that this run started from, directly or through other runs."""
    seen: set[Path] = set()
    while run_dir not in seen:
        seen.add(run_dir)
        if (run_dir / "huggingface" / GENERATION_CONFIG_FILE).exists():
            return run_dir / "huggingface"
        before = _read_settings(run_dir).get("run", {}).get("init_from")
        if not before:
            return None
        run_dir = Path(str(before))
    return None
