"""The manifest of a checkpoint, `manifest.json`, and the shard reports of the ranks from which it is built.

A checkpoint is a directory of safetensors files and one manifest. All of it is plain numbers and plain JSON, so loading
runs no code. The manifest is written last: a directory without a valid manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.checksum import FileChecksum
from raytrain_hpc.errors import CheckpointCorruptedError, CheckpointError
from raytrain_hpc.state.shard_index import Box, StateIndex, TensorSlices
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.object_path import ObjectPath

MANIFEST_FILE = "manifest.json"
FORMAT = "raytrain-hpc-2"
_READABLE_FORMATS = (FORMAT, "raytrain-hpc-1")  # the first had sha256 checksums
HF_CONFIG_KEY = "transformers"  # key in `meta` of a transformers model: the content of its config.json
LORA_META_KEY = "adapters"  # key in `meta` of a model with LoRA adapters: their rank and alpha


def get_shard_name(rank: int) -> str:
    """Return the name of the shard file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True)
class ShardEntry:
    """One box in a shard file. `key` is its name inside the file, `shape` the tensor's global shape."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class ShardReport:
    """A shard file that a rank has written and synced, with its checksum.

    A rank sends its report to the driver, which publishes the checkpoint once all ranks have reported.
    """

    file: str
    checksum: FileChecksum
    entries: tuple[ShardEntry, ...]
    host: str = ""  # name of the node of a file in node-local storage

    def to_json(self) -> dict[str, Any]:
        """Convert to dicts, lists, strings and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardReport:
        """Build a report from the output of `to_json`."""
        entries = (
            ShardEntry(**{**entry, **{key: tuple(entry[key]) for key in ("shape", "offsets", "sizes")}})
            for entry in data["entries"]
        )
        return cls(data["file"], FileChecksum.from_json(data["checksum"]), tuple(entries), data.get("host", ""))


@dataclass(frozen=True)
class ShardLocation:
    """The location of one box in a checkpoint: tensor `key` in `file`."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint, as described by its manifest.

    `locations[name]` has the order of `index[name].boxes`. `meta` is the JSON given when it was published.
    """

    path: Location
    step: int
    generation: int
    files: Mapping[str, FileChecksum]
    index: StateIndex
    locations: Mapping[str, tuple[ShardLocation, ...]]
    meta: Mapping[str, Any]
    files_path: Location  # directory of the shard files


def build_index(reports: Sequence[ShardReport]) -> StateIndex:
    """Build the index of all boxes in these files, in the order of the reports.

    Raises CheckpointError if two entries disagree on a tensor's shape or dtype.
    """
    first_entries: dict[str, ShardEntry] = {}
    boxes: dict[str, list[Box]] = {}
    for report in reports:
        for entry in report.entries:
            first_entry = first_entries.setdefault(entry.name, entry)
            if (first_entry.shape, first_entry.dtype) != (entry.shape, entry.dtype):
                expected, actual = (f"{e.dtype} {list(e.shape)}" for e in (first_entry, entry))
                raise CheckpointError(f"{report.file} holds {entry.name} as {actual}, another rank as {expected}")
            boxes.setdefault(entry.name, []).append(Box(entry.offsets, entry.sizes))
    return StateIndex(TensorSlices(name, e.shape, e.dtype, tuple(boxes[name])) for name, e in first_entries.items())


def build_manifest(
    step: int, generation: int, reports: Sequence[ShardReport], meta: Mapping[str, Any], directory: str = ""
) -> dict[str, Any]:
    """Build the manifest, as JSON, of a checkpoint of these shard files. Raises TypeError if `meta` is not JSON.

    `directory`: of the shard files, below that of the manifest; empty if they lie beside it.
    """
    index: dict[str, dict[str, Any]] = {}
    for report in reports:
        for entry in report.entries:
            tensor = index.setdefault(entry.name, {"shape": entry.shape, "dtype": entry.dtype, "parts": []})
            location = {"file": report.file, "key": entry.key, "offsets": entry.offsets, "sizes": entry.sizes}
            tensor["parts"].append(location)
    manifest = {
        "format": FORMAT,
        "step": step,
        "generation": generation,
        "files": {report.file: asdict(report.checksum) for report in reports},
        "index": index,
        "meta": meta,
        **({"directory": directory} if directory else {}),
    }
    # Convert to JSON and back, so that the checksum covers what a reader parses: string keys, lists for tuples.
    manifest = json.loads(json.dumps(manifest))
    return {**manifest, "checksum": _compute_checksum(manifest)}


def _compute_checksum(manifest: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of the manifest without its checksum, to detect a damaged manifest."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(path: Location) -> Checkpoint:
    """Read the manifest of the checkpoint in directory `path`. The shard files are not opened.

    Raises CheckpointCorruptedError if the manifest is missing, is not JSON, or is inconsistent. Raises CheckpointError
    if an object store does not answer.
    """
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_bytes())
    except FileNotFoundError as error:
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is missing") from error
    except OSError as error:
        kind = CheckpointError if isinstance(path, ObjectPath) else CheckpointCorruptedError
        raise kind(f"{path}: {MANIFEST_FILE} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") not in _READABLE_FORMATS:
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is not of format {FORMAT}")
    if manifest.get("checksum") != _compute_checksum(manifest):
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} does not match its own checksum")
    try:
        return _parse_checkpoint(path, manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptedError(f"{path}: {MANIFEST_FILE} is malformed: {error!r}") from error


def _parse_checkpoint(path: Location, manifest: Mapping[str, Any]) -> Checkpoint:
    """Convert a manifest to a Checkpoint. Raises ValueError, KeyError, TypeError or AttributeError if malformed."""
    files = {name: FileChecksum.from_json(entry) for name, entry in manifest["files"].items()}
    directory = str(manifest.get("directory", ""))
    for name in (*files, *([directory] if directory else [])):
        if Path(name).name != name:
            raise ValueError(f"file name {name!r} leaves the directory")
    locations: dict[str, tuple[ShardLocation, ...]] = {}
    tensors = []
    for name, entry in manifest["index"].items():
        locations[name] = tuple(
            ShardLocation(
                part["file"], part["key"], Box(tuple(map(int, part["offsets"])), tuple(map(int, part["sizes"])))
            )
            for part in entry["parts"]
        )
        if unlisted := {location.file for location in locations[name]} - files.keys():
            raise ValueError(f"{name} lies in {min(unlisted)}, which is not listed")
        boxes = tuple(location.box for location in locations[name])
        tensors.append(TensorSlices(name, tuple(map(int, entry["shape"])), entry["dtype"], boxes))
    return Checkpoint(
        path,
        int(manifest["step"]),
        int(manifest["generation"]),
        files,
        StateIndex(tensors),
        locations,
        manifest["meta"],
        path / directory if directory else path,
    )
