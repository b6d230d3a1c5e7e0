"""Writer of datasets from given tokens, without `prepare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest
from raytrain_hpc.data.dataset.token_shards import ShardWriter


def write_dataset(
    directory: Path,
    splits: dict[str, Sequence[npt.NDArray[np.int64]]],
    *,
    vocab_size: int,
    shard_tokens: int = 1 << 16,
    prompt: int = 0,
) -> Manifest:
    """Write splits of documents, arrays of tokens below `vocab_size`; the first `prompt` of each are no targets."""
    directory.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, documents in splits.items():
        writer = ShardWriter(directory, name, "uint16", shard_tokens, masked=prompt > 0)
        counted = np.concatenate([np.arange(document.size) >= prompt for document in documents])
        ends = np.cumsum([document.size for document in documents])
        writer.append(np.concatenate(documents), ends, counted if prompt else None)
        written[name] = writer.close()
    manifest = Manifest({"name": "byte"}, vocab_size, "uint16", prompt > 0, None, {}, (), written)
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    return manifest
