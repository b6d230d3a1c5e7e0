"""Ray's messages about dead workers: which are hidden, and how a death is described."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import ray._private.worker as ray_worker
from ray.exceptions import OutOfMemoryError, RayError

from raytrain_hpc.driver.ray_messages import DeathMessageFilter, describe_actor_death

NODE_ID = "89fd1844c531b1e0fa74348e5d5978d0189eeab7ebfed6f154cd3a2c"
# As printed by Ray 2.60 after SIGKILL, and after the loss of a node; shortened.
WORKER_DIED = (
    "A worker died or was killed while executing a task by an unexpected system error. To troubleshoot the problem, "
    f"check the logs for the dead worker. Lease ID: 01 Worker ID: e2 Node ID: {NODE_ID} Worker IP address: 10.0.0.1 "
    "Worker port: 39203 Worker PID: 9830 Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits"
)
NODE_DIED = (
    f"The node with node id: {NODE_ID} and address: 10.0.0.1 and node name: 10.0.0.1 has been marked dead because the "
    "detector has missed too many heartbeats from it."
)
RAYLET_DIED = (
    "Raylet is terminated. Termination is unexpected. Possible reasons include: (1) SIGKILL by the user or system OOM "
    "killer, (2) Invalid memory access from Raylet causing SIGSEGV or SIGBUS, (3) Other termination signals. "
)
NO_METRICS_AGENT = (
    "Failed to establish connection to the metrics exporter agent. Metrics will not be exported. Exporter agent "
    "status: RpcError: Running out of retries to initialize the metrics agent. rpc_code: 14"
)
RAYLET_LOG = f"Last 20 lines of the Raylet logs:\n    node_manager.cc:210: Initializing NodeManager. node_id={NODE_ID}"


def print_as_ray(line: str, pid: object = "raylet") -> None:
    """Print a line as Ray's threads do: through the name that the filter replaces."""
    ray_worker.print_to_stdstream({"lines": [line], "pid": pid, "is_err": False}, ignore_prefix=False)


def test_only_reported_deaths_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    def record(data: dict[str, Any], ignore_prefix: bool) -> None:
        printed.extend(data["lines"])

    monkeypatch.setattr(ray_worker, "print_to_stdstream", record)
    others = [WORKER_DIED.replace("9830", "98301"), NODE_DIED.replace("89fd", "89fe"), "2 workers killed: memory"]
    messages = DeathMessageFilter()
    messages.install()
    print_as_ray(WORKER_DIED)
    assert printed == [WORKER_DIED], "a worker that the run does not know"
    messages.hide([{"pid": 9830, "node_id": NODE_ID}])
    for line in (WORKER_DIED, NODE_DIED, *others):
        print_as_ray(line)
    print_as_ray(WORKER_DIED, pid=9831)  # a worker that prints such a text
    assert printed == [WORKER_DIED, *others, WORKER_DIED]
    print_as_ray(RAYLET_DIED + RAYLET_LOG)
    assert printed[-1] == RAYLET_DIED + "See raylet.out on its node."
    for pid in ("raylet", "gcs_server", 9831):
        print_as_ray(f"core_worker_process.cc:842: {NO_METRICS_AGENT}", pid)
    assert NO_METRICS_AGENT not in "".join(printed)
    messages.remove()
    print_as_ray(NODE_DIED)
    assert printed[-1] == NODE_DIED


def test_ray_prints_its_errors_through_the_filtered_name() -> None:
    assert "print_to_stdstream(" in inspect.getsource(ray_worker.listen_error_messages)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) "
            "the process was killed by the OOM killer",
            "its process was killed or crashed",
        ),
        (
            "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY Worker exit "
            "detail: Task was killed due to the node running low on memory.",
            "its process ended: Task was killed due to the node running low on memory",
        ),
        (f"The actor died because its node has died. Node Id: {NODE_ID}", "The actor died because its node has died. "),
    ],
)
def test_a_death_is_described_without_identifiers(text: str, described: str) -> None:
    reason = describe_actor_death(RayError(f"The actor died unexpectedly.\n\tactor_id: 01ab\n{text}"))
    assert reason.startswith(described) and NODE_ID not in reason and "Some common" not in reason


@pytest.mark.parametrize(
    "text",
    [
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.1, ID: 27753a) "
        "was 22.45GB used / 23.54GB limit (0.9537)\nOOM kill reason: Memory usage 1B exceeded threshold of 2B",
        "Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.1, ID: 084c3f33) where "
        "the lease (name=A.__init__, pid=26491, memory used=0.55GB) was running was 22.45GB / 23.54GB (0.9537), which "
        "exceeds the memory usage threshold of 0.95.",
    ],
    ids=["Ray 2.60", "Ray 2.50"],
)
def test_lack_of_memory_is_described_with_its_numbers(text: str) -> None:
    error = OutOfMemoryError(f"{text}\nRefer to the documentation on how to address the out of memory issue: https://a")
    reason = "Ray killed its process, because its node ran low on memory: 22.45 of 23.54 GB were in use"
    assert describe_actor_death(error) == reason
