"""Chunks to shards: one pass in order, which can be left at any point and gone on with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from raytrain_hpc.data.dataset.manifest import Shard, Split
from raytrain_hpc.data.dataset.token_shards import ShardWriter
from raytrain_hpc.data.preprocess.chunks import ChunkReport, Columns, get_chunk_path, read_chunk
from raytrain_hpc.data.preprocess.staging import StagingDirectory
from raytrain_hpc.errors import DataError


def compute_split_sizes(total: int, val_fraction: float) -> dict[str, int]:
    """Tokens of each split: train gets int(total * (1 - val_fraction)), computed on the decimal as written.

    DataError where a split would have fewer than the two tokens (one input, one target) that a loss needs.
    """
    train = int(total * (1 - Fraction(str(val_fraction))))
    sizes = {"train": train, "val": total - train} if val_fraction else {"train": total}
    for name, size in sizes.items():
        if size < 2:
            raise DataError(
                f"val_fraction={val_fraction}: of {total} tokens {size} would be left for {name}, which needs 2; "
                "give more text or another fraction"
            )
    return sizes


class ShardAssembler:
    """Deals the tokens of the chunks, in order, out to the splits. Holds one shard in memory.

    A chunk is removed as soon as all its tokens are in shards that are complete, so that tokens are on the disk once
    and not twice. What is complete is noted in the staging directory, and skipped the next time.
    """

    def __init__(
        self, staging: StagingDirectory, sizes: dict[str, int], dtype: str, shard_tokens: int, *, masked: bool
    ):
        """`sizes`: tokens of each split, in order."""
        self._staging = staging
        finished = staging.load_finished_shards()
        complete = {name: sum(shard.tokens for shard in finished.get(name, [])) for name in sizes}
        self._num_safe_tokens = sum(complete.values())  # tokens in complete shards; the first ones of the stream
        self._remaining_tokens = {name: size - complete[name] for name, size in sizes.items()}
        self._writers = {
            name: ShardWriter(
                staging.dataset_dir,
                name,
                dtype,
                shard_tokens,
                masked=masked,
                finished_shards=finished.get(name, []),
                on_shard=self._make_shard_hook(name),
            )
            for name in sizes
        }
        self._splits: dict[str, Split] = {}

    def run(self, reports: Sequence[ChunkReport], on_chunk: Callable[[int], None]) -> dict[str, Split]:
        """Assemble all chunks; `tick(piece)` hears of each one that is done. OSError where the disk refuses."""
        begun, stop = self._num_safe_tokens, 0
        waiting: deque[tuple[int, Path]] = deque()  # (position after it, chunk) of those that are still needed
        for report in reports:
            start, stop = stop, stop + report.tokens
            chunk = get_chunk_path(self._staging.chunks_dir, report.piece)
            waiting.append((stop, chunk))
            skip = max(0, begun - start)
            for columns in read_chunk(chunk) if stop > begun else ():
                size = columns[0].size
                self._write_tokens(_slice_columns(columns, min(skip, size), size))
                skip = max(0, skip - size)
            while waiting and waiting[0][0] <= self._num_safe_tokens:
                waiting.popleft()[1].unlink(missing_ok=True)
            on_chunk(report.piece)
        return {name: self._splits.get(name) or self._close_split(name) for name in self._writers}

    def _write_tokens(self, columns: Columns) -> None:
        """Pass the next tokens of the stream on to the splits that lack some."""
        for name, writer in self._writers.items():
            taken = min(columns[0].size, self._remaining_tokens[name])
            writer.append(*_slice_columns(columns, 0, taken))
            self._remaining_tokens[name] -= taken
            if not self._remaining_tokens[name] and name not in self._splits:
                self._close_split(name)
            columns = _slice_columns(columns, taken, columns[0].size)

    def _close_split(self, name: str) -> Split:
        self._splits[name] = self._writers[name].close()
        return self._splits[name]

    def _make_shard_hook(self, split: str) -> Callable[[Shard], None]:
        def note(shard: Shard) -> None:
            self._staging.record_shard(split, shard)
            self._num_safe_tokens += shard.tokens

        return note


def _slice_columns(columns: Columns, first: int, stop: int) -> Columns:
    """Tokens [first, stop) of a batch, and the documents that end in them."""
    tokens, ends, counted = columns
    inside = ends[(ends > first) & (ends <= stop)] - first
    return tokens[first:stop], inside, None if counted is None else counted[first:stop]
