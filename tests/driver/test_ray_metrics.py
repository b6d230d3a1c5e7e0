"""Gauges on Ray, as Prometheus would read them."""

from __future__ import annotations

import time
import urllib.request

import ray

from raytrain_hpc.driver.ray_metrics import RayMetricsTracker
from tests.run_report.run_directories import make_metrics


def test_the_newest_step_is_what_prometheus_reads(ray_cluster: None) -> None:
    gauges = RayMetricsTracker("mine")
    gauges.write(make_metrics(3))
    gauges.write(make_metrics(4, **{"throughput/mfu": 0.5}))
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    shown: list[str] = []
    while not shown and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(address, timeout=5) as answer:
            text = answer.read().decode()
        shown = [row for row in text.splitlines() if "raytrain_train_loss{" in row and 'run="mine"' in row]
    assert shown and float(shown[-1].split()[-1]) == 2.0
