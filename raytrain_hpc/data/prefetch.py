"""A thread that makes the items of an iterator ahead of whoever takes them, within a number and a size."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from raytrain_hpc.errors import DataError

Item = TypeVar("Item")

_SOON_S, _TOGETHER = 0.0005, 8  # waking whoever waits costs as much as making a small item: some go together
_PARTS = 4  # of what may be ahead, at least so many groups
_END_S = 10.0  # a thread that reads from storage which no longer answers is left behind: it is a daemon


@dataclass(frozen=True)
class _End:
    """Behind the last item: nothing, or the error that stands in the next one's place."""

    error: Exception | None


class Prefetcher(Generic[Item]):
    """Takes items from a generator in a thread of its own. What it made ahead of `take` was not consumed.

    Items go one way through a queue in small groups, and what a group held goes back through another when all of it is
    taken: neither side holds a lock while the other works, and neither wakes the other for every item.
    """

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
        self._made: SimpleQueue[list[Item] | _End] = SimpleQueue()
        self._taking: deque[Item] = deque()
        self._freed: SimpleQueue[tuple[int, int]] = SimpleQueue()  # (items, bytes)
        self._group = (0, 0)  # the one that is being taken
        self._count = self._made_bytes = 0  # the thread's, who alone changes them
        self._taken = self._taken_bytes = 0  # the taker's
        self._end: _End | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._make, name="data-prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Item:
        """The next item. Raises what the generator raised in its place, and DataError behind its last one."""
        if not self._taking and self._end is None:
            some = self._made.get()
            if isinstance(some, _End):
                self._end = some
            else:
                self._taking.extend(some)
                self._group = len(some), sum(map(self._size, some))
        if self._taking:
            item = self._taking.popleft()
            size = self._size(item)
            self._taken, self._taken_bytes = self._taken + 1, self._taken_bytes + size
            if not self._taking:
                self._freed.put(self._group)
            return item
        if self._end is not None and self._end.error is not None:
            raise self._end.error
        raise DataError("nothing is left to be read ahead: more was asked for than the run's steps hold")

    @property
    def ahead(self) -> tuple[int, int]:
        """Items made and not taken, and their bytes."""
        return self._count - self._taken, self._made_bytes - self._taken_bytes

    def close(self) -> None:
        """End the thread and drop what it made."""
        self._closed = True
        self._freed.put((0, 0))
        self._thread.join(_END_S)
        self._made = SimpleQueue()
        self._taking.clear()
        self._end = _End(None)

    def _make(self) -> None:
        error, together = None, list[Item]()
        try:
            held = held_bytes = size_together = 0
            most = max(1, min(_TOGETHER, self._max_items // _PARTS))
            began = time.monotonic()
            for item in self._items:
                size = self._size(item)
                while held and (held >= self._max_items or held_bytes + size > self._max_bytes) and not self._closed:
                    if self._freed.empty():
                        together, size_together = self._hand_over(together), 0
                    items, size_of_all = self._freed.get()
                    held, held_bytes = held - items, held_bytes - size_of_all
                if self._closed:
                    break
                held, held_bytes = held + 1, held_bytes + size
                self._count, self._made_bytes = self._count + 1, self._made_bytes + size
                together.append(item)
                size_together += size
                now = time.monotonic()
                # Groups are a part of what may be ahead: else nothing would be ahead while one is taken.
                full = len(together) >= most or size_together * _PARTS >= self._max_bytes
                if now - began > _SOON_S or full:
                    together, size_together, began = self._hand_over(together), 0, now
        except Exception as raised:  # whatever it is, it belongs to the step that needs this item
            error = raised
        finally:
            self._items.close()
            self._hand_over(together)
            self._made.put(_End(error))

    def _hand_over(self, together: list[Item]) -> list[Item]:
        if together:
            self._made.put(together)
        return []
