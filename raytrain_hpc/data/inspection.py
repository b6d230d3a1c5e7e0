"""A dataset in words, for `raytrain-hpc prepare` and `raytrain-hpc inspect`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_hpc.data.manifest import Manifest, load_manifest, verify
from raytrain_hpc.data.shards import TokenArray
from raytrain_hpc.data.tokenizer import tokenizer_from_json

SAMPLE_TOKENS = 200


def summary(manifest: Manifest) -> str:
    """One line: how much text there was and how it was split."""
    if manifest.characters is None:
        text = f"{sum(item.bytes for item in manifest.inputs):,} bytes"
    else:
        text = f"{manifest.characters:,} characters"
    splits = [(f"{split.tokens:,}", {"val": "validation"}.get(name, name)) for name, split in manifest.splits.items()]
    return f"{text}, vocabulary {manifest.vocab_size}, {' and '.join(' '.join(part) for part in splits)} tokens"


def describe(directory: Path | str) -> str:
    """What a dataset holds, line by line, after verifying every checksum. DataError where it is damaged."""
    manifest = load_manifest(directory)
    verified = verify(directory, manifest)
    shards = {name: len(split.shards) for name, split in manifest.splits.items()}
    train = TokenArray.open(directory, manifest, "train")
    first = train.read(np.zeros(1, dtype=np.int64), min(SAMPLE_TOKENS, train.num_tokens))
    sample = tokenizer_from_json(manifest.tokenizer).decode(first[0])
    lines = [
        f"{directory}: {summary(manifest)}",
        f"tokenizer     {manifest.tokenizer['name']}, stored as {manifest.dtype}",
        f"inputs        {len(manifest.inputs)} files, {sum(item.bytes for item in manifest.inputs):,} bytes",
        f"shards        {', '.join(f'{count} {name}' for name, count in shards.items())}, {verified:,} bytes",
        "checksums     all verified",
        f"dataset hash  {manifest.dataset_hash}",
        f"first {first.size} tokens of train:",
        *(f"  | {_printable(line)}" for line in sample.split("\n")),
    ]
    return "\n".join(lines)


def _printable(line: str) -> str:
    """A line that cannot move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
