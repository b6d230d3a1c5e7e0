"""Setup of the C library's allocator for a process that allocates mostly from one thread."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # glibc's malloc.h


def use_single_malloc_arena() -> None:
    """Make all threads that have not allocated yet use the main arena (glibc only; otherwise do nothing).

    Ray runs the calls of an actor in a thread. By default glibc gives each thread an arena of its own, which fragments
    under tensors of many sizes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
