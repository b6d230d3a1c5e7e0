"""Training on an accelerator that is neither NVIDIA's nor AMD's nor Intel's: torch's "fake" of these tests."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.devices.fake_accelerator import MEMORY_BYTES, build_library
from tests.devices.train_on_fake import RUNS

TIMEOUT_S = 150


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train all runs on both devices in one process, which alone has the device."""
    directory = tmp_path_factory.mktemp("fake")
    command = [sys.executable, "-m", "tests.devices.train_on_fake", str(build_library(directory)), str(directory)]
    done = subprocess.run([*command, *RUNS], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_the_cpu(results: dict[str, dict[str, Any]], name: str) -> None:
    """Up to rounding: torch computes attention by other kernels there."""
    cpu, fake = results[name]["cpu"], results[name]["fake"]
    assert fake["losses"] == pytest.approx(cpu["losses"], rel=2e-3 if name == "bf16" else 2e-6)
    assert len(set(cpu["losses"])) == len(cpu["losses"]) == 5


@pytest.mark.parametrize("name", RUNS)
def test_batches_are_copied_by_a_stream_and_phases_measured_by_events(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    calls = results[name]["calls"]
    assert calls["set_device"] == 1 and calls["record_event"] >= 5 and calls["wait_event"] >= 5
    assert calls["Event.record"] >= 2 * 3 * 5 and calls["Event.synchronize"] > 0


def test_the_device_is_named_with_its_memory(results: dict[str, dict[str, Any]]) -> None:
    fake, cpu = results["plain"]["fake"], results["plain"]["cpu"]
    (worker,) = fake["device"]["workers"]
    assert worker["device"] == "Fake Accelerator 1" and worker["memory_gib"] == MEMORY_BYTES / 2**30
    assert fake["peak_gib"] == 2.0 != cpu["peak_gib"]
    assert cpu["device"]["workers"][0]["device"] == "cpu"


def test_snapshots_and_offload_use_streams_of_their_own(results: dict[str, dict[str, Any]]) -> None:
    plain = results["plain"]["calls"]
    assert results["snapshots and checkpoints"]["calls"]["wait_stream"] > plain["wait_stream"]
    assert results["offload"]["calls"]["wait_stream"] >= plain["wait_stream"] + 5
    assert results["offload"]["calls"]["Stream.synchronize"] >= 5, "gradients are on the host before the optimizer runs"
