"""Log of failures and what they cost: incidents.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import WorkerFailedError

_KEYS = ("kind", "rank", "node", "node_id", "pid", "operation", "reason", "recovered_s")


class IncidentLog:
    """Writer of incidents.jsonl. An incident is written when it is detected, and completed when the run has recovered.

    `detected_s` counts from the failed rank's last sign of life to detection, and `recovered_s` from detection to the
    next committed step. `steps_lost` counts the committed steps that are run again. Unknown values are null. `phases`
    holds the seconds of each phase of the recovery; those after the first add up to `recovered_s`:

    - detect: equal to `detected_s`;
    - abort: until all other ranks have ended the failed generation;
    - fence: until no rank of that generation can change anything: failed processes are killed, their records read;
    - rendezvous: until rank 0 begins the next generation, which may wait for workers;
    - communicator, state, data: until it has process groups, model and restored state, and its first batch;
    - first step: the rest.
    """

    def __init__(self, directory: RunDirectory, on_incident: Callable[[dict[str, Any]], None] = lambda incident: None):
        """Read the incidents of earlier starts. `on_incident`: called with each one, and again when it is complete."""
        self._directory, self._on_incident = directory, on_incident
        self._lines = [json.dumps(incident) for incident in directory.read_incidents()]
        self._open_incident: dict[str, Any] | None = None
        self._ready_record: dict[str, Any] | None = None  # of rank 0

    def record_failure(self, failure: WorkerFailedError, generation: int, committed_step: int, world: int) -> None:
        """Write the failure that ended a generation of `world` ranks after `committed_step` steps."""
        last_seen, self._ready_record = failure.last_seen, None
        detected_s = None if last_seen is None else failure.detected_at - last_seen
        aborted_at = failure.aborted_at or failure.detected_at
        self._open_incident = {
            "kind": failure.kind,
            "rank": failure.rank,
            "ranks": list(failure.ranks),
            "node": failure.node,
            "node_id": failure.node_id,
            "pid": failure.pid,
            "operation": failure.operation or f"training step {committed_step + 1}",
            "reason": failure.reason,
            "device": failure.device,
            "generation": generation,
            "world": world,
            "world_after": None,
            "step": committed_step,
            "time": failure.detected_at,
            "detected_s": detected_s,
            "recovered_s": None,
            "phases": {
                "detect": detected_s,
                "abort": aborted_at - failure.detected_at,
                "fence": time.time() - aborted_at,
            },
            "steps_lost": None,
            "stacks": failure.stacks,
        }
        self._lines.append("")
        self._write()
        self._on_incident(self._open_incident)

    def record_incident(self, record: dict[str, Any], generation: int, committed_step: int) -> None:
        """Write an incident that a rank reported and that is already over, such as a step whose loss was not finite.

        It is inserted before a failure from which the run has not recovered.
        """
        incident: dict[str, Any] = dict.fromkeys(_KEYS)
        incident |= {"time": time.time(), "detected_s": 0.0, "steps_lost": 0} | record
        incident |= {"generation": generation, "step": committed_step}
        incident.pop("type")
        self._lines.insert(len(self._lines) - (self._open_incident is not None), json.dumps(incident))
        self._directory.write_incidents(self._lines)
        self._on_incident(incident)

    def record_resumption(self, first_step: int, world: int) -> None:
        """Complete the open failure with the steps lost and the new world size. Call when a generation starts."""
        if self._open_incident is not None:
            self._open_incident |= {"steps_lost": self._open_incident["step"] - first_step, "world_after": world}
            self._write()

    def record_ready(self, record: dict[str, Any]) -> None:
        """Keep how long rank 0 has taken to build its part of the generation that follows a failure."""
        if record["rank"] == 0:
            self._ready_record = record

    def record_commit(self, metrics: dict[str, Any]) -> dict[str, Any] | None:
        """Record that a step was committed, and return the failure from which the run has now recovered, or None."""
        if self._open_incident is None:
            return None
        incident = self._open_incident
        incident["recovered_s"] = metrics["time/unix"] - incident["time"]
        if self._ready_record is not None:
            incident["phases"] = _complete_phases(incident, self._ready_record, metrics)
        self._write()
        self._open_incident = None
        self._on_incident(incident)
        return incident

    def _write(self) -> None:
        self._lines[-1] = json.dumps(self._open_incident)
        self._directory.write_incidents(self._lines)


def _complete_phases(incident: dict[str, Any], ready: dict[str, Any], metrics: dict[str, Any]) -> dict[str, float]:
    """Return all phases of a recovery. `ready` and `metrics`: of rank 0, whose clock may differ from the driver's."""
    durations, data_s = ready["durations"], metrics["time/data_s"]
    first_step_s = metrics["time/unix"] - ready["unix"] - data_s
    known = {"abort": incident["phases"]["abort"], "fence": incident["phases"]["fence"]}
    building = {**durations, "data": durations["data"] + data_s, "first step": first_step_s}
    rendezvous_s = incident["recovered_s"] - sum(known.values()) - sum(building.values())
    return {"detect": incident["phases"]["detect"], **known, "rendezvous": rendezvous_s, **building}
