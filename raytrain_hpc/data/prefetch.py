"""A thread that makes the items of an iterator ahead of whoever takes them, within a number and a size."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from raytrain_hpc.errors import DataError

Item = TypeVar("Item")

_END_S = 10.0  # a thread that reads from storage which no longer answers is left behind: it is a daemon


class Prefetcher(Generic[Item]):
    """Takes items from a generator in a thread of its own. What it made ahead of `take` was not consumed."""

    def __init__(
        self,
        items: Generator[Item, None, None],
        *,
        size: Callable[[Item], int],
        max_items: int,
        max_bytes: int,
    ):
        """`size`: bytes that an item holds. At least one item is made ahead, however large it is."""
        self._items, self._size = items, size
        self._max_items, self._max_bytes = max_items, max_bytes
        self._made: deque[Item] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._make, name="data-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item. Raises what the generator raised in its place, and DataError behind its last one."""
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._ended or self._closed)
            if self._made:
                item = self._made.popleft()
                self._bytes -= self._size(item)
                self._changed.notify_all()
                return item
            if self._error is not None:
                raise self._error
            raise DataError("nothing is left to be read ahead: more was asked for than the run's steps hold")

    @property
    def ahead(self) -> tuple[int, int]:
        """Items made and not taken, and their bytes."""
        with self._changed:
            return len(self._made), self._bytes

    def close(self) -> None:
        """End the thread and drop what it made."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _make(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
        except Exception as error:  # whatever it is, it belongs to the step that needs this item
            self._error = error
        finally:
            self._items.close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, item: Item) -> bool:
        """Keep an item, once there is room for it. False where nobody wants it any more."""
        size = self._size(item)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(size))
            if self._closed:
                return False
            self._made.append(item)
            self._bytes += size
            self._changed.notify_all()
            return True

    def _has_room(self, size: int) -> bool:
        if not self._made:
            return True
        return len(self._made) < self._max_items and self._bytes + size <= self._max_bytes
