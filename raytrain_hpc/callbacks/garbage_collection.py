"""Garbage collection at fixed steps, the same on all ranks."""

from __future__ import annotations

import gc
from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.errors import CallbackError


class GarbageCollection(Callback):
    """Python's cyclic garbage collection after every `interval` steps, and at no other time.

    Automatic collection stops ranks at different steps, and the others wait for them in the next collective.
    """

    priority = -100

    def __init__(self, interval: int = 100, *, generation: int = 1):
        """`generation`: the oldest generation of objects that is collected, 0 to 2."""
        if interval < 1 or not 0 <= generation <= 2:
            raise CallbackError(
                f"GarbageCollection: interval={interval} must be positive, generation={generation} 0 to 2"
            )
        self._interval, self._generation, self._was_enabled = interval, generation, False

    def pre_train(self) -> None:
        """Turn automatic collection off."""
        self._was_enabled = gc.isenabled()
        gc.disable()

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Collect if it is due."""
        if self.context.step % self._interval == 0:
            gc.collect(self._generation)

    def close(self) -> None:
        """Turn automatic collection on again."""
        if self._was_enabled:
            gc.enable()
