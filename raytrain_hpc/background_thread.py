"""A thread that does something again and again while a context is active."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def run_in_background(name: str, target: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `target(done)` in a thread called `name`; set `done` at the end of the context and wait for the thread.

    `target` must return soon after `done` is set, as a loop over `while not done.wait(interval_s)` does.
    """
    done = threading.Event()
    thread = threading.Thread(target=target, args=(done,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
