"""Gauges on Ray, as Prometheus reads them."""

from __future__ import annotations

import time
import urllib.request

import ray

from raytrain_hpc.driver.ray_metrics import RayMetricsTracker
from tests.run_report.run_directories import make_metrics


def test_prometheus_reads_the_newest_step(ray_cluster: None) -> None:
    tracker = RayMetricsTracker("mine")
    tracker.on_metrics(make_metrics(3))
    tracker.on_metrics(make_metrics(4, **{"throughput/mfu": 0.5}))
    node = ray.nodes()[0]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    rows: list[str] = []
    while not rows and time.monotonic() < deadline:
        time.sleep(0.5)
        with urllib.request.urlopen(address, timeout=5) as response:
            text = response.read().decode()
        rows = [row for row in text.splitlines() if "raytrain_train_loss{" in row and 'run="mine"' in row]
    assert rows and float(rows[-1].split()[-1]) == 2.0
