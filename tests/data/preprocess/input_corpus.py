"""Inputs of every format for `prepare`, and a reference tokenization of them."""

from __future__ import annotations

import base64
import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_hpc.data.dataset.manifest import load_manifest
from raytrain_hpc.data.dataset.mapped_shards import ShardFile, map_shard

# With all kinds of whitespace, also repeated.
WORDS = [
    "the",
    "of",
    "naïve",
    "tokens,",
    "中文字",
    "read\n\nline",
    "two\ttab\r\n",
    "12345",
    "don't;",
    "x=\n   y",
    "😀",
    "",
]


def make_document(seed: int, words: int) -> str:
    """Make a document of random words, determined by the seed."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


def write_rank_file(path: Path) -> Path:
    """Write a tiktoken rank file of all bytes and a few pairs."""
    pairs = ["th", "the", " t", " the", "re", "ea", "in", "\n\n", "  ", "to", "12", "\n "]
    tokens = [bytes([byte]) for byte in range(256)] + [pair.encode() for pair in pairs]
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))
    return path


def write_mixed(folder: Path) -> list[str]:
    """Write a folder with a file of every format; return its documents in order."""
    folder.mkdir()
    documents = [make_document(i, 40 + 60 * (i % 3)) for i in range(60)]
    long = make_document(99, 1500)
    (folder / "a.txt").write_bytes(long.encode())
    (folder / "b.txt.gz").write_bytes(gzip.compress(documents[0].encode()))
    _write_lines(folder / "c.jsonl", documents[1:20])
    with pa.CompressedOutputStream(str(folder / "d.jsonl.zst"), "zstd") as file:
        file.write("".join(_line(text) for text in documents[20:40]).encode())
    pq.write_table(pa.table({"n": list(range(20)), "text": documents[40:]}), folder / "e.parquet", row_group_size=6)
    (folder / "f.txt").write_text("")  # an empty document, skipped
    return [long, *documents]


def write_pairs(path: Path) -> list[tuple[str, str]]:
    """Write prompts and responses, with an empty second response; return them."""
    pairs = [(make_document(i, 9), make_document(i + 100, 0 if i == 1 else 14)) for i in range(30)]
    path.write_text("".join(json.dumps({"prompt": p, "response": r, "id": 1}) + "\n" for p, r in pairs))
    return pairs


def _write_lines(path: Path, documents: list[str]) -> None:
    path.write_text("\n".join(_line(text).strip() for text in documents))  # without the optional newline at the end


def _line(text: str) -> str:
    return json.dumps({"id": 7, "text": text}, ensure_ascii=len(text) % 2 == 0) + "\n"


def read_contents(directory: Path) -> tuple[list[int], list[int], list[int]]:
    """Read tokens, document ends and loss mask of a dataset, split after split."""
    manifest = load_manifest(directory)
    tokens, ends, counted = [], [], []
    for split in manifest.splits.values():
        for shard in split.shards:
            file = ShardFile(directory / shard.file, shard.tokens, shard.documents)
            mapped = map_shard(file, manifest.dtype, masked=manifest.masked)
            ends += (mapped.ends + len(tokens)).tolist()
            tokens += mapped.tokens.tolist()
            counted += mapped.counted.tolist()
    return tokens, ends, counted


def tokenize_documents(documents: list[str], tokenizer) -> tuple[list[int], list[int]]:
    """Tokenize every document as a whole; return tokens and document ends."""
    tokens: list[int] = []
    ends: list[int] = []
    for text in documents:
        tokens += tokenizer.encode(text).tolist() + ([] if tokenizer.end_of_text is None else [tokenizer.end_of_text])
        ends.append(len(tokens))
    return tokens, ends


def tokens_to_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.uint8).tobytes()
