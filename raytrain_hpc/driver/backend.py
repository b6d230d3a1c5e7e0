"""Protocols for the place where workers run: an ExecutionBackend creates the WorkerGroup of a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.cluster_following import NodeCapacity
from raytrain_hpc.elastic.device_allocation import Allowance
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.worker_spec import WorkerSpec

T = TypeVar("T")
RegroupRequest = Literal["pause", "save", None]  # end the generation to form another; "save": after saving a checkpoint


class WorkerGroup(Protocol):
    """The workers of a run, from which the members of each generation are chosen."""

    def start(self) -> None:
        """Start the workers. Call once, before the first generation. Raises ClusterError if they do not start."""

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        """Block until `count` workers are ready.

        Raises ClusterError after `timeout_s` seconds (default: cluster.start_timeout), or if no worker is to start.
        """

    def get_capacity(self) -> tuple[NodeCapacity, ...] | None:
        """Return the live nodes of the cluster that the run follows, as last read; None if it follows none."""

    def get_allowance(self) -> Allowance:
        """Return the devices that the run may hold beside other runs on its cluster."""

    def scale_up_to(self, count: int, wanted: int | None = None) -> None:
        """Start workers in the background until there are `count`; return at once.

        `wanted`: those that the run would have on a cluster of its own; None: any number.
        """

    def list_candidates(self) -> list[Candidate]:
        """Return the ready workers, draining ones included, with the state parts held since their last generation."""

    def list_held_parts(self) -> tuple[StatePart, ...]:
        """Return the state parts that nodes hold of workers that are lost, for workers that start there."""

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        """Set the workers of the next generation in rank order, and return host and device facts of each rank.

        Call before `run_generation`.
        """

    def run_generation(
        self,
        spec: WorkerSpec,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], RegroupRequest],
    ) -> str:
        """Run one generation until its ranks end, and return its outcome.

        `on_record` is called with each record that a rank emits. Setting `stop_event` saves and stops after the current
        step. `poll_regroup` is called repeatedly; a request from it ends the generation at a step boundary.

        Returns "done", "stopped" (saved), "paused" (the state is in memory), or "lost" (no rank holds part of the
        state). Raises WorkerFailedError if a rank failed, and CheckpointCorruptedError if one has found the checkpoint
        to resume from damaged; the surviving workers remain candidates.
        """

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """Return the metrics of steps after `after_step` up to `until_step` from a surviving worker's memory."""

    def call_on_nodes(self, function: Callable[[], T], timeout_s: float) -> dict[str, T]:
        """Call a picklable function in one member per node, and return the results by node id.

        Call between generations, after `set_members`. Nodes without a result within `timeout_s` seconds are left out.
        Raises the RaytrainError of a function that raises one.
        """

    def discard_state(self) -> None:
        """Mark the training state in the workers' memory as unusable for recovery."""

    def close(self) -> None:
        """Stop all workers and release their slots."""


class ExecutionBackend(Protocol):
    """A Ray cluster or this process, with room for `world_size` workers."""

    world_size: int
    cluster: Topology
    uses_existing_cluster: bool  # a Ray cluster that was running before this run, and may have a dashboard

    @property
    def follows_cluster(self) -> bool:
        """Whether the run has as many workers as the cluster has room for. `world_size` may then be lowered."""

    def create_worker_group(self, config: Config) -> WorkerGroup:
        """Create the worker group for `config` without starting it."""
