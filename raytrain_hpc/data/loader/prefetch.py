"""Prefetching: a thread that produces items ahead of the consumer, bounded by their number and size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from raytrain_hpc.errors import DataError

Item = TypeVar("Item")

_JOIN_TIMEOUT_S = 10.0  # abandon a thread (a daemon) whose storage does not respond


@dataclass(frozen=True)
class _EndMarker:
    """End of the items: exhausted, or the error raised in place of the next item."""

    error: Exception | None


class Prefetcher(Generic[Item]):
    """Background thread that runs a generator ahead of `take`. Items not taken do not count as consumed.

    Items pass through one queue, and credits for taken items return through another, so that neither side holds a
    lock while the other works. Waking a thread costs as much as producing a small item: batch small items.
    """

    def __init__(
        self,
        items: Generator[Item, None, None],
        *,
        size: Callable[[Item], int],
        max_items: int,
        max_bytes: int,
        count: Callable[[Item], int] = lambda item: 1,
    ):
        """Start the thread. `size`: bytes of an item; `count`: items it counts as. Always prefetches at least one."""
        self._items, self._size, self._count = items, size, count
        self._max_items, self._max_bytes = max_items, max_bytes
        self._queue: SimpleQueue[Item | _EndMarker] = SimpleQueue()
        self._credits: SimpleQueue[tuple[int, int]] = SimpleQueue()  # (items, bytes)
        self._num_put = self._put_bytes = 0  # written by the thread only
        self._num_taken = self._taken_bytes = 0  # written by the consumer only
        self._end: _EndMarker | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """Return the next item. Raises the generator's error in its place, and DataError after the last item."""
        item = self._queue.get() if self._end is None else self._end
        if not isinstance(item, _EndMarker):
            count, size = self._count(item), self._size(item)
            self._num_taken, self._taken_bytes = self._num_taken + count, self._taken_bytes + size
            self._credits.put((count, size))
            return item
        self._end = item
        if item.error is not None:
            raise item.error
        raise DataError("nothing is left to prefetch: more items were requested than the steps of the run hold")

    @property
    def backlog(self) -> tuple[int, int]:
        """Items produced and not yet taken, and their bytes."""
        return self._num_put - self._num_taken, self._put_bytes - self._taken_bytes

    def close(self) -> None:
        """Stop the thread and drop its items."""
        self._is_closed = True
        self._credits.put((0, 0))
        self._thread.join(_JOIN_TIMEOUT_S)
        self._queue = SimpleQueue()
        self._end = _EndMarker(None)

    def _run(self) -> None:
        error = None
        try:
            num_buffered = buffered_bytes = 0
            for item in self._items:
                count, size = self._count(item), self._size(item)
                while num_buffered and (
                    num_buffered + count > self._max_items or buffered_bytes + size > self._max_bytes
                ):
                    if self._is_closed:
                        break
                    num_taken, taken_bytes = self._credits.get()
                    num_buffered, buffered_bytes = num_buffered - num_taken, buffered_bytes - taken_bytes
                if self._is_closed:
                    break
                num_buffered, buffered_bytes = num_buffered + count, buffered_bytes + size
                self._num_put, self._put_bytes = self._num_put + count, self._put_bytes + size
                self._queue.put(item)
        except Exception as exception:  # raised again by `take`, in the step that needs this item
            error = exception
        finally:
            self._items.close()
            self._queue.put(_EndMarker(error))
