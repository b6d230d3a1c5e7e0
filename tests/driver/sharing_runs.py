"""Two runs on a simulated cluster of four slots: one of higher priority starts and ends in the middle of another.

python -m tests.driver.sharing_runs [TIMES] prints how long the hand-overs take.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.driver.cli_process import wait_until
from tests.driver.following_run import FOLLOWING, FollowingRun
from tests.driver.throttle import throttle
from tests.driver.two_node_cluster import TwoNodeCluster

SLOTS, URGENT_SLOTS, URGENT_STEPS = 4, 2, 40
PATIENT = ["data.engine=local", "fault.stall_timeout=20"]  # a busy machine is no fault

OBSERVER = """
import json, ray, sys, time
from raytrain_hpc.driver.coordinator_client import NAME, NAMESPACE
ray.init(logging_level="ERROR", log_to_driver=False)
print("{}", flush=True)
last = {}
while True:
    time.sleep(0.02)
    try:
        claims = ray.get(ray.get_actor(NAME, NAMESPACE).list_claims.remote(), timeout=1)
    except (ValueError, ray.exceptions.RayError):
        continue
    held = {claim.name: claim.held for claim in claims}
    if held != last:
        since = {claim.name: claim.since for claim in claims}
        print(json.dumps({"time": time.time(), "held": held, "since": since}), flush=True)
    last = held
"""


@dataclass(frozen=True)
class HandOver:
    """Seconds from the first claim of the urgent run, and from the end of its last step.

    `over_s`: until it holds its slots, as the coordinator knows. `urgent_step_s`: until its first step, which waits
    for its workers to start. `back_s`: until the other run holds all slots again. `back_step_s`: until it trains on all
    of them. `pauses_s`: of the other run at both changes.
    """

    over_s: float
    urgent_step_s: float
    back_s: float
    back_step_s: float
    pauses_s: tuple[float, ...]


class SharedCluster:
    """A cluster of four slots with a run on it, and an observer of what the coordinator knows."""

    def __init__(self, directory: Path, python: Path | str = sys.executable):
        """Start the cluster, the run and the observer. `python`: with which workers are started."""
        self.directory = directory
        self.cluster = TwoNodeCluster(python=python)
        self._log = directory / "observed.jsonl"
        with self._log.open("w") as out:
            self._observer = subprocess.Popen([sys.executable, "-c", OBSERVER], env=self.cluster.env, stdout=out)
        settings = [*FOLLOWING, *PATIENT, *throttle(SLOTS), "train.steps=100000", "cluster.min_workers=2"]
        self.run = FollowingRun(self.cluster, directory / "patient", *settings)
        self.run.wait_for_size(SLOTS)
        wait_until(lambda: bool(self._log.read_text()), timeout_s=60)

    def start_urgent_run(self, number: int = 0) -> FollowingRun:
        """Start the run of higher priority."""
        words = [f"cluster.workers={URGENT_SLOTS}", "cluster.priority=5", f"train.steps={URGENT_STEPS}"]
        return FollowingRun(self.cluster, self.directory / f"urgent{number}", *words, *throttle(URGENT_SLOTS), *PATIENT)

    def kill_coordinator(self) -> None:
        """Kill the process of the coordinator of this cluster."""
        (coordinator,) = self.cluster.find_workers("RunCoordinator")
        coordinator.kill()

    def measure(self, urgent: FollowingRun) -> HandOver:
        """Return how long the hand-overs to a run that has ended, and from it, have taken."""
        name, mine, started = urgent.directory.name, self.run.directory.name, urgent.read_metrics()
        observed = [json.loads(line) for line in self._log.read_text().splitlines()[1:]]
        since = next(line["since"][name] for line in observed if name in line["since"])
        over = next(line["time"] for line in observed if line["held"].get(name) == URGENT_SLOTS)
        end = started[-1]["time/unix"]
        back = next(line["time"] for line in observed if line["time"] > end and line["held"].get(mine) == SLOTS)
        changes = [pair for pair in self.run.find_changes() if pair[1]["time/unix"] > since]
        gaps = [after["time/unix"] - before["time/unix"] - after["time/step_s"] for before, after in changes]
        return HandOver(
            over - since,
            started[0]["time/unix"] - since,
            back - end,
            changes[1][1]["time/unix"] - end,
            tuple(gaps),
        )

    def close(self) -> None:
        self.run.close()
        self._observer.kill()
        self._observer.wait()
        self.cluster.close()


def main(times: int) -> None:
    shared = SharedCluster(Path(tempfile.mkdtemp(prefix="sharing-")))
    print(shared.directory, flush=True)
    try:
        for number in range(times):
            urgent = shared.start_urgent_run(number)
            assert urgent.process.wait(timeout=120) == 0, urgent.output
            shared.run.wait_for_size(SLOTS)
            time.sleep(1.0)
            hand_over = asdict(shared.measure(urgent))
            print({name: value if isinstance(value, tuple) else round(value, 2) for name, value in hand_over.items()})
    finally:
        print(shared.run.output[-3000:])
        shared.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
