"""Health of the GPUs of a node, read in the background."""

from __future__ import annotations

import threading
import time

import pytest

from raytrain_hpc.driver import node_agent
from raytrain_hpc.driver.device_monitor import DeviceMonitor
from raytrain_hpc.driver.node_agent import NodeAgent, WatchedProcess
from raytrain_hpc.errors import WorkerFailedError
from raytrain_hpc.nvml import GpuHealth
from tests.warm_pool import make_small_config


def count_threads() -> int:
    return sum(thread.name == "devices" for thread in threading.enumerate())


def wait_for(condition: object, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_gpus_are_read_again_and_again_and_a_lost_one_keeps_its_last_state() -> None:
    temperatures = {"0000:18:00.0": 60, "0000:19:00.0": 61}

    def read(address: str) -> GpuHealth | None:
        return GpuHealth(temperature_c=temperatures[address]) if address in temperatures else None

    monitor, before = DeviceMonitor(read, interval_s=0.01), count_threads()
    monitor.watch({3: "0000:18:00.0", 4: "0000:19:00.0"})
    assert monitor.get_health() == {3: GpuHealth(temperature_c=60), 4: GpuHealth(temperature_c=61)}
    temperatures["0000:18:00.0"] = 95
    wait_for(lambda: monitor.get_health()[3].temperature_c == 95)
    del temperatures["0000:18:00.0"]  # the GPU has fallen off the bus
    time.sleep(0.05)
    assert monitor.get_health()[3].temperature_c == 95
    monitor.watch({4: "0000:19:00.0"})
    assert monitor.get_health().keys() == {4} and count_threads() == before + 1
    monitor.close()
    wait_for(lambda: count_threads() == before)


def test_nothing_runs_where_no_gpu_can_be_read() -> None:
    monitor, before = DeviceMonitor(lambda address: None, interval_s=0.01), count_threads()
    monitor.watch({})
    monitor.watch({0: "0000:18:00.0"})
    assert monitor.get_health() == {} and count_threads() == before
    monitor.close()


def test_an_agent_reports_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "DeviceMonitor", lambda: DeviceMonitor(lambda address: GpuHealth(temperature_c=70)))
    agent = NodeAgent(make_small_config(None))
    try:
        agent.watch({0: WatchedProcess(1, "none", "0000:18:00.0"), 1: WatchedProcess(2, "none")})
        assert agent.get_health().devices == {0: GpuHealth(temperature_c=70)}
    finally:
        agent.close()


def test_a_failure_names_the_state_of_the_gpu() -> None:
    failure = WorkerFailedError(3, "h1", 77, "died", "killed by signal 9", device="63 C, 2 uncorrected ECC errors")
    assert str(failure) == "rank 3 (node h1, pid 77) died: killed by signal 9 (GPU: 63 C, 2 uncorrected ECC errors)"
    assert str(WorkerFailedError(3, "h1", 77, "died", "gone")) == "rank 3 (node h1, pid 77) died: gone"
