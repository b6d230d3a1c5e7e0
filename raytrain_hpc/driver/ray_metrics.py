"""Gauges for the Ray dashboard and Prometheus: the metrics of the newest step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.metrics import Gauge

from raytrain_hpc.observability.metrics import KEYS


class Gauges:
    """One gauge a metric, named raytrain_SECTION_NAME and tagged with the run's name."""

    def __init__(self, run: str):
        self._run = run
        self._gauges: dict[str, Gauge] = {}

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Show a step's numbers."""
        if not ray.is_initialized():
            return
        for key, value in metrics.items():
            if value is not None:
                self._gauge(key).set(float(value), {"run": self._run})

    def close(self, *, failed: bool) -> None:
        """Nothing to do: what is shown last stays until Ray ends."""

    def _gauge(self, key: str) -> Gauge:
        if key not in self._gauges:
            name = "raytrain_" + re.sub(r"\W", "_", key)
            self._gauges[key] = Gauge(name, description=KEYS.get(key, key), tag_keys=("run",))
        return self._gauges[key]
