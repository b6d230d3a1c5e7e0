"""Shards in an object store, read by range requests: only the requested windows are fetched."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.dataset.storage import RemoteFile
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import ReadRetry


class RemoteTokens:
    """Tokens of a remote shard; each slice is one range request."""

    def __init__(self, file: RemoteFile, offset: int, dtype: str, retry: ReadRetry):
        self._file, self._offset, self._dtype, self._retry = file, offset, np.dtype(dtype), retry

    def __getitem__(self, key: slice) -> npt.NDArray[Any]:
        width = self._dtype.itemsize
        num_bytes = (key.stop - key.start) * width
        data = self._file.call(partial(self._read_at, num_bytes, self._offset + key.start * width), self._retry)
        if len(data) != num_bytes:
            raise DataError(f"{self._file}: truncated; prepare the dataset again")
        return np.frombuffer(data, dtype=self._dtype)

    def _read_at(self, num_bytes: int, offset: int) -> Any:
        try:
            return self._handle.read_at(num_bytes, offset)
        except OSError:
            self.__dict__.pop("_handle", None)  # one that is stale stays so
            raise

    @cached_property
    def _handle(self) -> Any:
        return self._file.open()


class RemoteShard:
    """Counterpart of `MappedShard` for a remote file. Document ends and mask are fetched once, on first use."""

    def __init__(self, file: RemoteFile, offset: int, dtype: str, *, masked: bool, retry: ReadRetry):
        """Open lazily; `offset` is the byte at which the tokens begin."""
        self._file, self._masked, self._retry = file, masked, retry
        self.tokens = RemoteTokens(file, offset, dtype, retry)

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """Positions after the last token of each document, int64[documents]."""
        return self._read_column("ends")

    @cached_property
    def counted(self) -> npt.NDArray[Any]:
        """Loss mask, uint8[tokens]; empty if the dataset has none."""
        return self._read_column("counted") if self._masked else np.empty(0, dtype=np.uint8)

    def _read_column(self, name: str) -> npt.NDArray[Any]:
        try:
            return self._file.call(partial(self._open_column, name), self._retry)
        except (KeyError, IndexError, AttributeError) as error:
            raise DataError(f"{self._file}: not a readable shard ({error}); prepare the dataset again") from error

    def _open_column(self, name: str) -> npt.NDArray[Any]:
        with self._file.open() as file:
            options = pa.ipc.IpcReadOptions(included_fields=[pa.ipc.open_file(file).schema.get_field_index(name)])
            batch = pa.ipc.open_file(file, options=options).get_batch(0)
            column: npt.NDArray[Any] = batch.column(name).values.to_numpy(zero_copy_only=True)
            return column
