"""A thread that makes the items of an iterator ahead of whoever takes them, within a number and a size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from raytrain_hpc.errors import DataError

Item = TypeVar("Item")

_JOIN_TIMEOUT_S = 10.0  # a thread that reads from storage which no longer answers is left behind: it is a daemon


@dataclass(frozen=True)
class _EndMarker:
    """Behind the last item: nothing, or the error that stands in the next one's place."""

    error: Exception | None


class Prefetcher(Generic[Item]):
    """Takes items from a generator in a thread of its own. What it made ahead of `take` was not consumed.

    Items go one way through a queue, and what they held goes back through another: neither side holds a lock while the
    other works. Waking whoever waits costs as much as making a small item, so that items had better be some together.
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
        """`size`: bytes of an item; `count`: for how many it counts. At least one is made ahead, however large."""
        self._items, self._size, self._count = items, size, count
        self._max_items, self._max_bytes = max_items, max_bytes
        self._queue: SimpleQueue[Item | _EndMarker] = SimpleQueue()
        self._credits: SimpleQueue[tuple[int, int]] = SimpleQueue()  # (items, bytes)
        self._num_put = self._put_bytes = 0  # the thread's, who alone changes them
        self._num_taken = self._taken_bytes = 0  # the taker's
        self._end: _EndMarker | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item. Raises what the generator raised in its place, and DataError behind its last one."""
        item = self._queue.get() if self._end is None else self._end
        if not isinstance(item, _EndMarker):
            count, size = self._count(item), self._size(item)
            self._num_taken, self._taken_bytes = self._num_taken + count, self._taken_bytes + size
            self._credits.put((count, size))
            return item
        self._end = item
        if item.error is not None:
            raise item.error
        raise DataError("nothing is left to be read ahead: more was asked for than the run's steps hold")

    @property
    def backlog(self) -> tuple[int, int]:
        """What was made and not taken: items, as they count, and their bytes."""
        return self._num_put - self._num_taken, self._put_bytes - self._taken_bytes

    def close(self) -> None:
        """End the thread and drop what it made."""
        self._is_closed = True
        self._credits.put((0, 0))
        self._thread.join(_JOIN_TIMEOUT_S)
        self._queue = SimpleQueue()
        self._end = _EndMarker(None)

    def _run(self) -> None:
        error = None
        try:
            held = held_bytes = 0
            for item in self._items:
                count, size = self._count(item), self._size(item)
                while held and (held + count > self._max_items or held_bytes + size > self._max_bytes):
                    if self._is_closed:
                        break
                    items, size_of_all = self._credits.get()
                    held, held_bytes = held - items, held_bytes - size_of_all
                if self._is_closed:
                    break
                held, held_bytes = held + count, held_bytes + size
                self._num_put, self._put_bytes = self._num_put + count, self._put_bytes + size
                self._queue.put(item)
        except Exception as raised:  # whatever it is, it belongs to the step that needs this item
            error = raised
        finally:
            self._items.close()
            self._queue.put(_EndMarker(error))
