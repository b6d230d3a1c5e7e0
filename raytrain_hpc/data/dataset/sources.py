"""Data sources of a run: the `data` section of a config resolved to token arrays, weights and a dataset hash."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from raytrain_hpc.config.schema import DataConfig, RunConfig, SourceConfig
from raytrain_hpc.data.dataset.builtin import SyntheticTokens, prepare_stdlib_dataset
from raytrain_hpc.data.dataset.inspect import describe
from raytrain_hpc.data.dataset.local_cache import copy_to_local_cache
from raytrain_hpc.data.dataset.manifest import Manifest, load_manifest, verify_shards
from raytrain_hpc.data.dataset.storage import Location, parse_location
from raytrain_hpc.data.dataset.token_shards import TokenArray, TokenSource
from raytrain_hpc.data.tokenizer.base import Tokenizer
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry

STDLIB, SYNTHETIC = "stdlib", "synthetic"
_SYNTHETIC_VAL_TOKENS = 1 << 16
_SYNTHETIC_VOCAB_SIZE = 256  # unless the settings give one


@dataclass(frozen=True)
class Dataset:
    """Opened sources. Cheap to pickle: holds paths, not tokens.

    `val` is the concatenation of the validation splits, unweighted, or None if no source has one. `tokenizer` is
    None for synthetic tokens. `mixture` describes the sources as JSON values: [{dataset_hash, weight}, ...].
    """

    train: tuple[TokenSource, ...]
    val: TokenSource | None
    weights: tuple[float, ...]
    tokenizer: Tokenizer | None
    vocab_size: int
    dataset_hash: str
    mixture: tuple[dict[str, Any], ...]


def open_dataset(
    data: DataConfig,
    *,
    seed: int,
    vocab_size: int | None = None,
    verify_limit_bytes: int | None = 256 << 20,
    cache_dir: Path | None = None,
    check_files: bool = True,
    retry: ReadRetry = NO_RETRY,
    on_block: Callable[[], None] = lambda: None,
) -> Dataset:
    """Open `data.path` or `data.sources`: a dataset directory or URI, stdlib or synthetic.

    `vocab_size` (None: 256) and `seed` apply to synthetic tokens only. Shard sizes are verified unless `check_files` is
    False, checksums for up to `verify_limit_bytes` of each dataset (None: all). `cache_dir`: local directory to which
    shards are copied first, unless they are cached already; `on_block`: called before each block of them. `retry`:
    repeats reads that fail, now and later. Raises DataError for a missing or damaged dataset, and for sources with
    different tokenizers.
    """
    sources = list(data.sources) or [SourceConfig(path=data.path)]
    if any(source.path == SYNTHETIC for source in sources):
        if len(sources) > 1:
            raise DataError("data.sources: synthetic tokens cannot be mixed with other sources; use them alone")
        return _open_synthetic(_SYNTHETIC_VOCAB_SIZE if vocab_size is None else vocab_size, seed)
    directories = [prepare_stdlib_dataset() if s.path == STDLIB else parse_location(s.path) for s in sources]
    manifests = _load_manifests(directories, retry)
    if cache_dir is not None:
        datasets = list(zip(directories, manifests, strict=True))
        directories = [copy_to_local_cache(*dataset, cache_dir, retry, on_block) for dataset in datasets]
    elif check_files:
        for directory, manifest in zip(directories, manifests, strict=True):
            verify_shards(directory, manifest, limit_bytes=verify_limit_bytes, retry=retry)
    datasets = list(zip(directories, manifests, strict=True))
    return _open_prepared(datasets, [source.weight for source in sources], retry)


def describe_source(path: str) -> str:
    """Describe a dataset as `data.path` names it: a directory, stdlib (prepared if it is not cached), or synthetic.

    Raises DataError if it is missing or damaged.
    """
    if path != SYNTHETIC:
        return describe(prepare_stdlib_dataset() if path == STDLIB else path)
    dataset = _open_synthetic(_SYNTHETIC_VOCAB_SIZE, seed=RunConfig().seed)
    return "\n".join(
        [
            "synthetic: random tokens computed when they are read; no files, no tokenizer, no documents",
            f"tokens        unlimited for training, {_SYNTHETIC_VAL_TOKENS:,} for validation",
            f"vocabulary    model.vocab_size, {_SYNTHETIC_VOCAB_SIZE} if it is auto",
            f"dataset hash  {dataset.dataset_hash}, for this vocabulary and run.seed={RunConfig().seed}",
        ]
    )


def _open_synthetic(vocab_size: int, seed: int) -> Dataset:
    train = SyntheticTokens(vocab_size, seed)
    val = SyntheticTokens(vocab_size, seed + 1, _SYNTHETIC_VAL_TOKENS)
    identity = train.dataset_hash
    return Dataset((train,), val, (1.0,), None, vocab_size, identity, _describe_mixture([identity], [1.0]))


def _load_manifests(directories: Sequence[Location], retry: ReadRetry) -> list[Manifest]:
    manifests = [load_manifest(directory, retry) for directory in directories]
    for directory, manifest in zip(directories, manifests, strict=True):
        if manifest.tokenizer != manifests[0].tokenizer:
            raise DataError(
                f"data.sources: {directory} and {directories[0]} have different tokenizers or vocabularies; "
                "prepare them with the same one"
            )
    return manifests


def _open_prepared(
    datasets: Sequence[tuple[Location, Manifest]], weights: Sequence[float], retry: ReadRetry
) -> Dataset:
    manifests = [manifest for _, manifest in datasets]
    hashes = [manifest.dataset_hash for manifest in manifests]
    return Dataset(
        train=tuple(TokenArray.open(directory, manifest, "train", retry) for directory, manifest in datasets),
        val=_open_validation(datasets, retry),
        weights=tuple(weights),
        tokenizer=tokenizer_from_json(manifests[0].tokenizer),
        vocab_size=manifests[0].vocab_size,
        dataset_hash=hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest(),
        mixture=_describe_mixture(hashes, weights),
    )


def _open_validation(datasets: Sequence[tuple[Location, Manifest]], retry: ReadRetry) -> TokenArray | None:
    splits = [TokenArray.open(path, manifest, "val", retry) for path, manifest in datasets if "val" in manifest.splits]
    return reduce(add, splits) if splits else None


def _describe_mixture(hashes: Sequence[str], weights: Sequence[float]) -> tuple[dict[str, Any], ...]:
    return tuple({"dataset_hash": h, "weight": float(w)} for h, w in zip(hashes, weights, strict=True))
