"""The C library's allocator, set up for a process that allocates from one busy thread."""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # glibc's malloc.h


def use_single_malloc_arena() -> None:
    """Let every thread that has not allocated yet use the main arena (glibc; elsewhere nothing happens).

    Ray runs an actor's calls in a thread, and glibc gives threads arenas of their own, which fragment under tensors of
    many sizes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
