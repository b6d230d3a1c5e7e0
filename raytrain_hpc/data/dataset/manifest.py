"""Dataset manifest: `manifest.json` of a dataset directory, and verification of the shards against it.

DIR/manifest.json        tokenizer, counts, inputs, and a checksum per shard
DIR/train-00000.arrow    one uncompressed Arrow IPC file per shard (see token_shards.py)
DIR/val-00000.arrow
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raytrain_hpc.data.dataset.storage import (
    Location,
    RemoteFile,
    get_file_size,
    get_file_sizes,
    parse_location,
    read_local,
)
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry

MANIFEST_FILE = "manifest.json"
VERSION = 2


@dataclass(frozen=True)
class InputRecord:
    """An input file of a dataset. `name` is the path relative to the given folder, or the file name.

    `sha256`: hash of its bytes; for a file read in several ranges, hash of the ranges' hex digests in order.
    """

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Shard:
    """A shard file, relative to the dataset directory.

    `documents`: number of documents that end in it; `offset`: byte at which its tokens begin, for range requests.
    """

    file: str
    tokens: int
    documents: int
    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Shards of `train` or `val`, in order."""

    tokens: int
    documents: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Manifest:
    """Description of a dataset. `characters` is None for the byte tokenizer, where each byte is a token.

    `masked`: whether shards store which tokens count as targets (fine-tuning on responses).
    `empty_documents`: number of inputs or rows without text, which were skipped.
    """

    tokenizer: dict[str, Any]
    vocab_size: int
    dtype: str
    masked: bool
    characters: int | None
    settings: dict[str, Any]
    inputs: tuple[InputRecord, ...]
    splits: dict[str, Split]
    empty_documents: int = 0
    version: int = VERSION

    @property
    def dataset_hash(self) -> str:
        """Hash that identifies the tokens: sha256 over the tokenizer and the shard checksums, split by split."""
        shards = {name: [shard.sha256 for shard in split.shards] for name, split in sorted(self.splits.items())}
        identity = json.dumps({"tokenizer": self.tokenizer, "shards": shards}, sort_keys=True)
        return hashlib.sha256(identity.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, including the dataset hash."""
        return {**asdict(self), "dataset_hash": self.dataset_hash}


def manifest_from_json(data: Mapping[str, Any]) -> Manifest:
    """Parse the output of `Manifest.to_json`. Raises KeyError, TypeError or ValueError if it is malformed."""
    splits = {
        name: Split(int(split["tokens"]), int(split["documents"]), tuple(Shard(**shard) for shard in split["shards"]))
        for name, split in data["splits"].items()
    }
    manifest = Manifest(
        tokenizer=dict(data["tokenizer"]),
        vocab_size=int(data["vocab_size"]),
        dtype=str(data["dtype"]),
        masked=bool(data["masked"]),
        characters=data["characters"],
        settings=dict(data["settings"]),
        inputs=tuple(InputRecord(**item) for item in data["inputs"]),
        splits=splits,
        empty_documents=int(data.get("empty_documents", 0)),
        version=int(data["version"]),
    )
    for name, split in splits.items():
        if split.tokens != sum(shard.tokens for shard in split.shards):
            raise ValueError(f"the shards of {name} do not add up to its {split.tokens} tokens")
        if split.documents != sum(shard.documents for shard in split.shards):
            raise ValueError(f"the shards of {name} do not add up to its {split.documents} documents")
        if any(Path(shard.file).name != shard.file for shard in split.shards):
            raise ValueError(f"a shard of {name} lies outside the directory")
    if data["dataset_hash"] != manifest.dataset_hash:
        raise ValueError("dataset_hash does not match the checksums")
    return manifest


def load_manifest(directory: Location | str, retry: ReadRetry = NO_RETRY) -> Manifest:
    """Load the manifest of the dataset at `directory`, a path or URI. Raises DataError if missing or damaged."""
    directory = parse_location(directory) if isinstance(directory, str) else directory
    path = directory / MANIFEST_FILE
    if get_file_size(path, retry) is None:
        if isinstance(directory, Path) and not directory.exists():
            raise DataError(f"{directory}: no such directory; write a dataset with `raytrain-hpc prepare`")
        raise DataError(f"{directory}: not a dataset (no {MANIFEST_FILE}); write one with `raytrain-hpc prepare`")
    try:
        data = json.loads(
            path.read(retry) if isinstance(path, RemoteFile) else read_local(path.read_bytes, path, retry)
        )
        version = data["version"]
        if version == VERSION:
            return manifest_from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path}: damaged ({type(error).__name__}: {reason}); prepare the dataset again") from error
    raise DataError(f"{path}: version={version!r} is not supported, only {VERSION} is; prepare the dataset again")


def verify_shards(
    directory: Location | str, manifest: Manifest, *, limit_bytes: int | None = None, retry: ReadRetry = NO_RETRY
) -> int:
    """Verify the shards against the manifest; return the number of bytes whose checksum was computed.

    Presence and size of every shard are always checked. Checksums are computed in order for shards on disk, up to
    `limit_bytes` in total (None: all). Remote shards are hashed when they are copied to the local cache. Raises
    DataError naming the first shard that is missing, truncated or changed.
    """
    directory = parse_location(directory) if isinstance(directory, str) else directory
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    paths = [directory / shard.file for shard in shards]
    for shard, path, size in zip(shards, paths, get_file_sizes(paths, retry), strict=True):
        if size is None:
            raise DataError(f"{path}: shard is missing; prepare the dataset again")
        if size != shard.bytes:
            raise DataError(f"{path}: shard has {size} bytes instead of {shard.bytes}; prepare the dataset again")
    hashed_bytes = 0
    for shard, path in zip(shards, paths, strict=True):
        if isinstance(path, RemoteFile) or (limit_bytes is not None and hashed_bytes + shard.bytes > limit_bytes):
            continue
        if compute_file_sha256(path, retry) != shard.sha256:
            raise DataError(f"{path}: shard does not match its sha256; prepare the dataset again")
        hashed_bytes += shard.bytes
    return hashed_bytes


def compute_file_sha256(path: Path, retry: ReadRetry = NO_RETRY) -> str:
    """Compute the hex sha256 of a file. Raises DataError if it cannot be read."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return read_local(compute, path, retry)
