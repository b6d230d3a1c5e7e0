"""Data for benchmarks without a download: the standard library's source files, and documents of random tokens."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import numpy as np

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest
from raytrain_hpc.data.dataset.token_shards import ShardWriter, choose_token_dtype

_PART_BYTES = 32 << 20


def write_corpus(folder: Path, size: int) -> list[Path]:
    """Write at least `size` bytes of JSONL to `folder`, one source file per line; deterministic per Python version."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = sorted(path for path in root.rglob("*.py") if not path.is_relative_to(root / "site-packages"))
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in sources if path.stat().st_size]
    folder.mkdir()
    files: list[Path] = []
    num_written, rng = 0, random.Random(0)
    while num_written < size:
        files.append(folder / f"part-{len(files):04d}.jsonl")
        start = num_written
        with files[-1].open("w", encoding="utf-8") as file:
            while num_written < size and num_written - start < _PART_BYTES:
                text = rng.choice(texts)
                line = json.dumps({"text": text}) + "\n"
                file.write(line)
                num_written += len(line)
    return files


def write_token_documents(folder: Path, num_tokens: int, vocab_size: int, mean_length: int) -> None:
    """Write a dataset of `num_tokens` random tokens, in documents whose lengths are geometrically distributed."""
    generator, dtype = np.random.default_rng(0), choose_token_dtype(vocab_size)
    ends = generator.geometric(1 / mean_length, 2 * num_tokens // mean_length + 1).cumsum()
    folder.mkdir(parents=True)
    splits = {}
    for split, size in (("train", num_tokens), ("val", max(1, num_tokens // 10))):
        writer = ShardWriter(folder, split, dtype, 1 << 24)
        writer.append(generator.integers(vocab_size, size=size).astype(dtype), ends[ends <= size])
        splits[split] = writer.close()
    manifest = Manifest({"name": "byte"}, vocab_size, dtype, False, None, {}, (), splits)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
