"""Human-readable descriptions of a dataset, for `raytrain-hpc prepare` and `raytrain-hpc inspect`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_hpc.data.dataset.manifest import Manifest, load_manifest, verify_shards
from raytrain_hpc.data.dataset.mapped_shards import ShardFile, map_shard
from raytrain_hpc.data.dataset.storage import is_remote, parse_location
from raytrain_hpc.data.dataset.token_shards import TokenArray
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.errors import DataError

SAMPLE_TOKENS = 200


def format_summary(manifest: Manifest) -> str:
    """Format the size of the input, the vocabulary size and the tokens per split as one line."""
    if manifest.characters is None:
        text = f"{sum(item.bytes for item in manifest.inputs):,} bytes"
    else:
        text = f"{manifest.characters:,} characters"
    splits = [(f"{split.tokens:,}", {"val": "validation"}.get(name, name)) for name, split in manifest.splits.items()]
    return f"{text}, vocabulary {manifest.vocab_size}, {' and '.join(' '.join(part) for part in splits)} tokens"


def format_prepare_summary(manifest: Manifest) -> list[str]:
    """Format the closing lines of `prepare`: the summary, and the number of skipped empty documents."""
    empty = manifest.empty_documents
    skipped = [f"{empty:,} empty document{'s' if empty > 1 else ''} skipped"] if empty else []
    return [format_summary(manifest), *skipped]


def describe(directory: Path | str) -> str:
    """Describe a dataset in lines of text after verifying every checksum. Raises DataError if damaged or remote."""
    if is_remote(directory):
        raise DataError(f"{parse_location(directory)}: inspect needs a local path; copy the dataset to a disk first")
    directory = Path(directory)
    manifest = load_manifest(directory)
    verified = verify_shards(directory, manifest)
    shards = {name: len(split.shards) for name, split in manifest.splits.items()}
    train = TokenArray.open(directory, manifest, "train")
    sample = train.read(np.zeros(1, dtype=np.int64), min(SAMPLE_TOKENS, train.num_tokens))
    tokenizer = tokenizer_from_json(manifest.tokenizer)
    ending = "" if tokenizer.end_of_text is None else f", token {tokenizer.end_of_text} after every document"
    lines = [
        f"{directory}: {format_summary(manifest)}",
        f"tokenizer     {tokenizer.name}, stored as {manifest.dtype}{ending}",
        f"inputs        {len(manifest.inputs)} files, {sum(item.bytes for item in manifest.inputs):,} bytes",
        *(f"documents     {_describe_documents(directory, manifest, name)}" for name in manifest.splits),
        *([f"left out      {manifest.empty_documents:,} empty documents"] if manifest.empty_documents else []),
        *([f"loss          {_describe_loss_mask(directory, manifest)}"] if manifest.masked else []),
        f"shards        {', '.join(f'{count} {name}' for name, count in shards.items())}, {verified:,} bytes",
        "checksums     all verified",
        f"dataset hash  {manifest.dataset_hash}",
        f"first {sample.size} tokens of train:",
        *(f"  | {_escape_control_characters(line)}" for line in tokenizer.decode(sample[0]).split("\n")),
    ]
    return "\n".join(lines)


def _list_shard_files(directory: Path, manifest: Manifest, split: str) -> list[ShardFile]:
    return [ShardFile(directory / s.file, s.tokens, s.documents) for s in manifest.splits[split].shards]


def _describe_documents(directory: Path, manifest: Manifest, split: str) -> str:
    """Describe number and lengths of the documents that end in a split. A document may begin in an earlier shard."""
    num_open_tokens = tokens = count = longest = 0
    shortest = manifest.splits[split].tokens
    for file in _list_shard_files(directory, manifest, split):
        ends = map_shard(file, manifest.dtype, masked=manifest.masked).ends
        if ends.size:
            lengths = np.diff(ends, prepend=-num_open_tokens)
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
            count, tokens = count + ends.size, tokens + int(lengths.sum())
            num_open_tokens = file.tokens - int(ends[-1])
        else:
            num_open_tokens += file.tokens
    if not count:
        return f"none in {split}"
    return f"{count:,} in {split}, of {shortest:,} to {longest:,} tokens, {tokens / count:,.0f} on average"


def _describe_loss_mask(directory: Path, manifest: Manifest) -> str:
    """Describe how many tokens count as targets."""
    total = counted = 0
    for name in manifest.splits:
        for file in _list_shard_files(directory, manifest, name):
            counted += int(map_shard(file, manifest.dtype, masked=True).counted.sum(dtype=np.int64))
            total += file.tokens
    return f"on {counted:,} of {total:,} tokens ({counted / total:.1%})"


def _escape_control_characters(line: str) -> str:
    """Escape unprintable characters, which could move the cursor of a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
