"""Rows of a Ray Data dataset as a map-style dataset: blocks in Ray's object store, which every worker maps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate
from typing import Any

import ray
from ray.data import DataContext, Dataset
from ray.data.block import BlockAccessor

_NUM_CACHED_BLOCKS = 16  # per worker process; mapped from the object store, not copied


class RayDataRows:
    """The rows of a Ray Data dataset in order. Row i is a dict as `Dataset.take` returns it.

    The blocks stay in the object store, or on its disk, as long as this object exists in the driver.
    """

    reads_object_store = True

    def __init__(self, dataset: Dataset):
        """Execute the dataset. Its own settings are those of before afterwards."""
        with _preserve_order(dataset.context):
            materialized = dataset.materialize()
            self._blocks: list[Any] = materialized.to_arrow_refs()
        self.column_names: list[str] = materialized.columns() or []
        count_rows = ray.remote(num_cpus=0)(_count_rows)
        self._ends = list(accumulate(ray.get([count_rows.remote(block) for block in self._blocks])))
        self._open_block = lru_cache(maxsize=_NUM_CACHED_BLOCKS)(self._open_block_uncached)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached blocks."""
        return {key: value for key, value in self.__dict__.items() if key != "_open_block"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the rows with an empty cache."""
        self.__dict__.update(state)
        self._open_block = lru_cache(maxsize=_NUM_CACHED_BLOCKS)(self._open_block_uncached)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return row `index` >= 0."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = bisect_right(self._ends, index)
        row = index - (self._ends[number - 1] if number else 0)
        block = BlockAccessor.for_block(self._open_block(number).slice(row, row + 1, copy=False))
        return dict(next(iter(block.iter_rows(public_row_format=True))))

    def _open_block_uncached(self, number: int) -> BlockAccessor:
        return BlockAccessor.for_block(ray.get(self._blocks[number]))


@contextmanager
def _preserve_order(context: DataContext) -> Iterator[None]:
    """Execute in order and without progress bars inside the context."""
    options, saved = context.execution_options, (context.execution_options.preserve_order, context.enable_progress_bars)
    options.preserve_order, context.enable_progress_bars = True, False
    try:
        yield
    finally:
        options.preserve_order, context.enable_progress_bars = saved


def _count_rows(block: Any) -> int:
    """Return the number of rows of an Arrow table. Runs as a Ray task, where the block is."""
    return int(block.num_rows)
