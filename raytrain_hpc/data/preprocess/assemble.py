"""Shard assembly: write the tokens of all chunks, in order, to shards. Can be interrupted and resumed at any point."""

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
    """Compute the tokens per split: train gets int(total * (1 - val_fraction)), exact in decimal arithmetic.

    Raises DataError if a split would have fewer than the two tokens (one input, one target) that a loss needs.
    """
    train = int(total * (1 - Fraction(str(val_fraction))))
    sizes = {"train": train, "val": total - train} if val_fraction else {"train": total}
    for name, size in sizes.items():
        if size < 2:
            raise DataError(
                f"val_fraction={val_fraction}: only {size} of {total} tokens left for {name}, which needs 2; "
                "add text or change the fraction"
            )
    return sizes


class ShardAssembler:
    """Writer that distributes the tokens of the chunks, in order, to the splits. Buffers one shard per split.

    A chunk is removed once all its tokens are in complete shards, so that tokens are on disk once rather than twice.
    Complete shards are recorded in the staging directory and skipped when the assembly is resumed.
    """

    def __init__(
        self, staging: StagingDirectory, sizes: dict[str, int], dtype: str, shard_tokens: int, *, masked: bool
    ):
        """Continue after the shards recorded in `staging`. `sizes`: tokens per split, in order."""
        self._staging = staging
        finished = staging.load_finished_shards()
        complete = {name: sum(shard.tokens for shard in finished.get(name, [])) for name in sizes}
        self._num_safe_tokens = sum(complete.values())  # tokens in complete shards: a prefix of the stream
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
        """Assemble all chunks; call `on_chunk(partition)` after each. Raises OSError if writing fails."""
        num_resumed, stop = self._num_safe_tokens, 0
        pending: deque[tuple[int, Path]] = deque()  # (end position, chunk) of chunks still needed
        for report in reports:
            start, stop = stop, stop + report.tokens
            chunk = get_chunk_path(self._staging.chunks_dir, report.piece)
            pending.append((stop, chunk))
            skip = max(0, num_resumed - start)
            for columns in read_chunk(chunk) if stop > num_resumed else ():
                size = columns[0].size
                self._write_tokens(_slice_columns(columns, min(skip, size), size))
                skip = max(0, skip - size)
            while pending and pending[0][0] <= self._num_safe_tokens:
                pending.popleft()[1].unlink(missing_ok=True)
            on_chunk(report.piece)
        return {name: self._splits.get(name) or self._close_split(name) for name in self._writers}

    def _write_tokens(self, columns: Columns) -> None:
        """Append the next tokens of the stream to the splits that are not full."""
        for name, writer in self._writers.items():
            count = min(columns[0].size, self._remaining_tokens[name])
            writer.append(*_slice_columns(columns, 0, count))
            self._remaining_tokens[name] -= count
            if not self._remaining_tokens[name] and name not in self._splits:
                self._close_split(name)
            columns = _slice_columns(columns, count, columns[0].size)

    def _close_split(self, name: str) -> Split:
        self._splits[name] = self._writers[name].close()
        return self._splits[name]

    def _make_shard_hook(self, split: str) -> Callable[[Shard], None]:
        def on_shard(shard: Shard) -> None:
            self._staging.record_shard(split, shard)
            self._num_safe_tokens += shard.tokens

        return on_shard


def _slice_columns(columns: Columns, first: int, stop: int) -> Columns:
    """Slice tokens [first, stop) of a batch, and the document ends inside."""
    tokens, ends, loss_mask = columns
    inner_ends = ends[(ends > first) & (ends <= stop)] - first
    return tokens[first:stop], inner_ends, None if loss_mask is None else loss_mask[first:stop]
