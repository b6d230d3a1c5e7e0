"""Metrics of the newest step as gauges, for the Ray dashboard and Prometheus."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.util.metrics import Gauge

from raytrain_hpc.callbacks.callback import DriverCallback
from raytrain_hpc.observability.metrics import METRIC_KEYS


class RayMetricsTracker(DriverCallback):
    """Experiment tracker with one gauge per metric, named raytrain_SECTION_NAME and tagged with the run's name."""

    optional = True

    def __init__(self, run_name: str):
        self._run_name = run_name
        self._gauges: dict[str, Gauge] = {}

    def on_metrics(self, metrics: dict[str, Any]) -> None:
        """Set the gauges to the metrics of a step."""
        if not ray.is_initialized():
            return
        for key, value in metrics.items():
            if value is not None:
                self._get_gauge(key).set(float(value), {"run": self._run_name})

    def _get_gauge(self, key: str) -> Gauge:
        if key not in self._gauges:
            name = "raytrain_" + re.sub(r"\W", "_", key)
            self._gauges[key] = Gauge(name, description=METRIC_KEYS.get(key, key), tag_keys=("run",))
        return self._gauges[key]
