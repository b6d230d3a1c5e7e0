"""A Hugging Face model as a run of zero steps: its weights as a checkpoint, its tokenizer, its shape as settings.

OUT/config.yaml  OUT/tokenizer.json  OUT/checkpoints/step-00000000/   as in any run directory
OUT/huggingface/                                                      files that export passes on
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import write_slices
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.loader import Setting, build_config, config_to_yaml
from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.data.tokenizer.base import TokenizerSpec
from raytrain_hpc.data.tokenizer.registry import load_tokenizer
from raytrain_hpc.errors import ModelError
from raytrain_hpc.huggingface.atomic_dir import (
    GENERATION_CONFIG_FILE,
    PASSTHROUGH_FILES,
    SPECIAL_TOKEN_KEYS,
    atomic_directory,
    read_json,
)
from raytrain_hpc.huggingface.model_configs import get_max_positions, parse_hf_config
from raytrain_hpc.huggingface.weight_mapping import IGNORED_SUFFIXES, WeightMapping, build_weight_mappings
from raytrain_hpc.state.shard_index import TensorSlices

SHARD_BYTES = 1 << 30
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class ImportResult:
    """What was written."""

    model_spec: ModelSpec
    tokenizer_kind: str | None  # its kind; None where the directory has no tokenizer.json


def import_model(source: str | Path, out: str | Path, *, shard_bytes: int = SHARD_BYTES) -> ImportResult:
    """Write the model in directory `source` as a run directory `out`, with weights in fp32.

    One tensor at a time is in memory. Raises ModelError for a model that no Decoder can be, or whose files do not hold
    what its config.json says; CheckpointError where `out` exists or cannot be written.
    """
    source, out = Path(source).expanduser(), Path(out).expanduser()
    config = read_json(source / "config.json")
    shape = parse_hf_config(config)
    positions, twins = get_max_positions(config), build_weight_mappings(shape)
    where = _locate_tensors(source, shape, twins)
    with atomic_directory(out) as directory:
        tokenizer = _import_tokenizer(source, directory, config)
        settings = spec_to_settings(shape) | {"max_positions": positions}
        made = [Setting(f"model.{key}", value, "config.json") for key, value in settings.items()]
        made += [Setting("run.name", out.name, ""), Setting("run.dir", str(out), "")]
        (directory / "config.yaml").write_text(config_to_yaml(build_config(made)))
        store = CheckpointStore(directory / "checkpoints")
        staging, reports = store.create_staging(0, 0), []
        for number, group in enumerate(_group_into_shards(twins, shard_bytes)):
            slices = [TensorSlices(f"model.{twin.name}", twin.shape, "float32", (twin.box,)) for twin in group]
            reports.append(write_slices(staging / get_shard_name(number), slices, _read_tensors(group, where)))
        meta: dict[str, Any] = {"model": asdict(shape), "dtype": "fp32", "seq_len": positions, "positions": positions}
        store.publish(0, 0, reports, meta | {"imported_from": str(source)}, lambda: None)
    return ImportResult(shape, tokenizer)


def _locate_tensors(source: Path, spec: ModelSpec, mappings: Sequence[WeightMapping]) -> dict[str, tuple[Path, str]]:
    """The file of every tensor, and its name in it, by the names of the twins."""
    where = {name: (path, name) for path in _list_weight_files(source) for name in _list_tensor_names(path)}
    if spec.positions == "learned" and not any(name.startswith("transformer.") for name in where):
        where = {f"transformer.{name}": place for name, place in where.items()}  # saved without its head
    wanted = {twin.hf_name for twin in mappings}
    if missing := sorted(wanted - where.keys()):
        raise ModelError(f"{source}: its files lack {missing[0]} and {len(missing) - 1} more of {len(wanted)} tensors")
    tied = {"lm_head.weight"} if spec.tie_embeddings else set()
    unknown = sorted(name for name in where.keys() - wanted - tied if not name.endswith(IGNORED_SUFFIXES))
    if unknown:
        raise ModelError(f"{source}: {unknown[0]} has no place in a decoder of this config.json")
    return where


def _list_weight_files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.exists():
        named = read_json(index).get("weight_map")
        if not isinstance(named, Mapping):
            raise ModelError(f"{index}: has no weight_map")
        return [source / Path(name).name for name in sorted(set(named.values()))]
    found = sorted(source.glob("*.safetensors"))
    if not found:
        raise ModelError(
            f"{source}: holds no .safetensors file; others are pickles, which can run code and are never loaded: "
            "save the model again with save_pretrained(DIR, safe_serialization=True)"
        )
    return found


def _list_tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _group_into_shards(mappings: Sequence[WeightMapping], shard_bytes: int) -> Iterator[list[WeightMapping]]:
    """Runs of tensors of at most so many bytes in fp32, but at least one."""
    group: list[WeightMapping] = []
    size = 0
    for twin in mappings:
        if group and size + 4 * twin.numel > shard_bytes:
            yield group
            group, size = [], 0
        group, size = [*group, twin], size + 4 * twin.numel
    yield group


def _read_tensors(group: Sequence[WeightMapping], locations: Mapping[str, tuple[Path, str]]) -> Iterator[torch.Tensor]:
    for twin in group:
        path, name = locations[twin.hf_name]
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor = file.get_tensor(name)  # a view of the mapped file
        if tuple(tensor.shape) != twin.hf_shape or tensor.dtype not in _FLOAT_DTYPES:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ModelError(f"{path}: {name} is {found}, and config.json makes it {list(twin.hf_shape)}")
        yield twin.to_native(tensor.to(torch.float32))


def _import_tokenizer(source: Path, directory: Path, config: Mapping[str, Any]) -> str | None:
    """Keep what the model's directory has of a tokenizer, and which tokens end what it generates."""
    kept = directory / "huggingface"
    kept.mkdir()
    for name in PASSTHROUGH_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, kept / name)
    if not (kept / GENERATION_CONFIG_FILE).exists():
        ends = {key: config[key] for key in SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        (kept / GENERATION_CONFIG_FILE).write_text(json.dumps(ends, indent=2) + "\n")
    if not (kept / "tokenizer.json").exists():
        return None
    tokenizer = load_tokenizer(TokenizerSpec("hf", str(source)))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(), indent=2) + "\n")
    return tokenizer.name
