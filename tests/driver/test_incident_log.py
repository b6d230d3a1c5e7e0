"""Phases of a recovery: each measured on one clock, and together the time to the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.driver.incident_log import IncidentLog
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import WorkerFailedError
from raytrain_hpc.observability.console import format_recovery


class Clock:
    """A replacement for the time module, as the driver sees it."""

    now = 1000.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("raytrain_hpc.driver.incident_log.time", clock)
    return clock


def make_failure(**times: float) -> WorkerFailedError:
    return WorkerFailedError(1, "n", 7, "died", "the reason", **times)


def make_ready(rank: int, unix: float, communicator: float, state: float, data: float) -> dict[str, Any]:
    durations = {"communicator": communicator, "state": state, "data": data}
    return {"type": "ready", "rank": rank, "unix": unix, "durations": durations}


@pytest.mark.parametrize("skew_s", [0.0, 3.0], ids=["one clock", "rank 0 is 3 s ahead"])
def test_every_phase_is_measured_where_it_passes(tmp_path: Path, clock: Clock, skew_s: float) -> None:
    log = IncidentLog(RunDirectory(tmp_path))
    clock.now = 1000.5
    log.record_failure(make_failure(last_seen=999.8, detected_at=1000.0, aborted_at=1000.2), 1, 8, 4)
    log.record_resumption(8, 3)
    log.record_ready(make_ready(0, 1001.5125 + skew_s, communicator=0.25, state=0.5, data=0.0625))
    log.record_ready(make_ready(2, 1001.0 + skew_s, communicator=5.0, state=5.0, data=5.0))
    incident = log.record_commit({"time/unix": 1002.0 + skew_s, "time/data_s": 0.125})
    assert incident is not None
    assert incident["phases"] == pytest.approx(
        {
            "detect": 0.2,
            "abort": 0.2,
            "fence": 0.3,
            "rendezvous": 0.2 + skew_s,
            "communicator": 0.25,
            "state": 0.5,
            "data": 0.1875,
            "first step": 0.3625,
        }
    )
    assert json.loads((tmp_path / "incidents.jsonl").read_text()) == incident
    assert log.record_commit({"time/unix": 1003.0, "time/data_s": 0.0}) is None, "the recovery is over"
    assert format_recovery(incident, verbose=True).startswith(
        f"rank 1 died at step 9; recovered in {2 + skew_s:.2f} s (detect 0.20, abort 0.20, fence 0.30, rendezvous "
    )


def test_phases_are_those_of_the_generation_that_recovers(tmp_path: Path, clock: Clock) -> None:
    """A generation that fails before its first step leaves nothing behind."""
    log = IncidentLog(RunDirectory(tmp_path))
    log.record_failure(make_failure(detected_at=999.0), 1, 8, 4)
    log.record_ready(make_ready(0, 1000.0, communicator=9.0, state=9.0, data=9.0))
    log.record_failure(make_failure(detected_at=1000.0), 2, 8, 3)
    incident = log.record_commit({"time/unix": 1001.0, "time/data_s": 0.0})
    assert incident is not None and incident["recovered_s"] == 1.0
    assert incident["phases"] == {"detect": None, "abort": 0.0, "fence": 0.0}, "rank 0 has reported no others"
