"""What broke, and what it cost: incidents.jsonl."""

from __future__ import annotations

import json
import time
from typing import Any

from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import WorkerFailedError


class IncidentLog:
    """An incident is written when it is seen, and completed when the run has recovered from it.

    `detected_s` counts from the last sign of life of the rank that failed, `recovered_s` from the detection to the next
    committed step, `steps_lost` the committed steps that are run again. What is not known, or not yet, is null.
    """

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._lines = directory.read_incidents()
        self._open_incident: dict[str, Any] | None = None

    def record_failure(self, failure: WorkerFailedError, generation: int, committed_step: int, world: int) -> None:
        """A generation of `world` ranks ended with this failure after `committed` steps."""
        seen = failure.last_seen
        self._open_incident = {
            "kind": failure.kind,
            "rank": failure.rank,
            "ranks": list(failure.ranks),
            "node": failure.node,
            "pid": failure.pid,
            "operation": failure.operation or f"training step {committed_step + 1}",
            "reason": failure.reason,
            "generation": generation,
            "world": world,
            "world_after": None,
            "step": committed_step,
            "time": failure.detected_at,
            "detected_s": None if seen is None else failure.detected_at - seen,
            "recovered_s": None,
            "steps_lost": None,
            "stacks": failure.stacks,
        }
        self._lines.append("")
        self._write()

    def record_incident(self, record: dict[str, Any], generation: int, committed_step: int) -> None:
        """Something that a rank reports, and that is over. Written before an incident that still goes on."""
        line: dict[str, Any] = dict.fromkeys(("kind", "rank", "node", "pid", "operation", "reason", "recovered_s"))
        line |= {"time": time.time(), "detected_s": 0.0, "steps_lost": 0} | record
        line |= {"generation": generation, "step": committed_step}
        line.pop("type")
        self._lines.insert(len(self._lines) - (self._open_incident is not None), json.dumps(line))
        self._directory.write_incidents(self._lines)

    def record_resumption(self, first_step: int, world: int) -> None:
        """The next generation starts from `first` committed steps on `world` ranks."""
        if self._open_incident is not None:
            self._open_incident |= {"steps_lost": self._open_incident["step"] - first_step, "world_after": world}
            self._write()

    def record_commit(self, commit_unix: float) -> dict[str, Any] | None:
        """A step was committed at this unix time. Returns the incident that the run has recovered from with it."""
        if self._open_incident is None:
            return None
        recovered, self._open_incident["recovered_s"] = self._open_incident, commit_unix - self._open_incident["time"]
        self._write()
        self._open_incident = None
        return recovered

    def _write(self) -> None:
        self._lines[-1] = json.dumps(self._open_incident)
        self._directory.write_incidents(self._lines)
