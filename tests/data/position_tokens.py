"""Datasets whose tokens encode their source and position."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest
from raytrain_hpc.data.dataset.token_shards import ShardWriter

VOCAB_SIZE = 1 << 28  # stored as uint32


def compute_tokens(source: int, positions: np.ndarray) -> np.ndarray:
    return ((source << 24) + positions).astype(np.uint32)


def write_dataset(
    directory: Path, source: int, tokens: int, *, shard_tokens: int = 40_000, masked: bool = False
) -> Path:
    """Write a dataset of `tokens` tokens, with a document end every 29 tokens and several shards."""
    directory.mkdir(parents=True)
    splits = {}
    for name, count in (("train", tokens), ("val", 200)):
        writer = ShardWriter(directory, name, "uint32", shard_tokens, masked=masked)
        positions = np.arange(count)
        writer.append(compute_tokens(source, positions), positions[28::29] + 1, (positions % 5 > 0).astype(np.uint8))
        splits[name] = writer.close()
    manifest = Manifest({"name": "byte"}, VOCAB_SIZE, "uint32", masked, None, {}, (), splits)
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    return directory
