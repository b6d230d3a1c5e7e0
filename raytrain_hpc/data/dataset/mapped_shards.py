"""Shards on a file system, memory-mapped. The file format is that of token_shards.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.dataset.storage import RemoteFile
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry, is_transient


@dataclass(frozen=True)
class ShardFile:
    """Location of a shard and its expected contents from the manifest."""

    path: Path | RemoteFile
    tokens: int
    documents: int
    offset: int = 0  # byte at which the tokens begin; used for remote shards only
    masked: bool = False  # whether it has a loss mask


@dataclass(frozen=True, eq=False)
class MappedShard:
    """Columns of a memory-mapped shard, read-only; `counted`, the loss mask, is empty if the dataset has none."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    counted: npt.NDArray[Any]


def map_shard(file: ShardFile, dtype: str, *, masked: bool, retry: ReadRetry = NO_RETRY) -> MappedShard:
    """Memory-map a shard. Raises DataError if the file cannot be read or does not match the manifest."""
    names = ["tokens", "ends", *(["counted"] if masked else [])]
    try:
        batches = retry(lambda: _map_batches(file), file.path)
        columns = [batches[0].column(name).values.to_numpy(zero_copy_only=True) for name in names]
    except (OSError, pa.ArrowException, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, OSError) and is_transient(error):
            raise DataError(f"{file.path}: cannot be read ({reason})") from error
        raise DataError(f"{file.path}: not a readable shard ({reason}); prepare the dataset again") from error
    tokens, ends = columns[:2]
    counted = columns[2] if masked else np.empty(0, dtype=np.uint8)
    actual = (len(batches), batches[0].num_rows, tokens.dtype, tokens.size, ends.size, counted.size)
    if actual != (1, 1, np.dtype(dtype), file.tokens, file.documents, file.tokens if masked else 0):
        raise DataError(
            f"{file.path}: holds {tokens.size} tokens of {tokens.dtype} in {ends.size} documents instead of "
            f"{file.tokens} of {dtype} in {file.documents}; prepare the dataset again"
        )
    return MappedShard(tokens, ends, counted)


def _map_batches(file: ShardFile) -> list[Any]:
    # Closing the file keeps the mapping, which the arrays reference, and frees the descriptor: a large dataset has more
    # shards than a process may have open files.
    with pa.memory_map(str(file.path)) as source:
        reader = pa.ipc.open_file(source)
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
