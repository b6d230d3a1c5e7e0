"""The actor that reads training data for the ranks of a generation, with `data.engine=ray`."""

from __future__ import annotations

from typing import Any

import ray

from raytrain_hpc.runtime.worker_spec import WorkerSpec


class DataFeeder:
    """Owner of the feeding actor of the current generation. `is_enabled`: whether the run reads through Ray Data."""

    def __init__(self, *, is_enabled: bool):
        self._is_enabled, self._actor = is_enabled, None

    def restart(self, spec: WorkerSpec) -> Any:
        """End the actor of the last generation, and return the one of a new generation; None if it needs none."""
        self.stop()
        if self._is_enabled and spec.block_plan.num_groups:
            from raytrain_hpc.data.loader.ray_loader import start_feeder  # slow import that few runs need

            self._actor = start_feeder(spec.stream_spec, spec.block_plan)
        return self._actor

    def stop(self) -> None:
        """End the actor, if there is one, and its readers with it."""
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)
            self._actor = None
