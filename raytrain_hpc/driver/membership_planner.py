"""Planner of generations: which workers form the next one, and when to end the current one to regroup."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import RegroupRequest, WorkerGroup
from raytrain_hpc.elastic.load_balancing import balance_by_speed
from raytrain_hpc.elastic.recovery import Candidate, Membership, plan_membership
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.errors import ClusterError, RunFailedError
from raytrain_hpc.planner.layout import Batching, Layout


class MembershipPlanner:
    """Applies the membership policy (elastic/recovery.py) to the workers of a run.

    `batching`: the microbatches of a step, fixed for the run. `estimate_bytes_by_axis`: as in `plan_membership`.
    `get_target_workers`: the number of workers that the run should have. `stop_event`: set to save and stop.
    """

    def __init__(
        self,
        config: Config,
        batching: Batching,
        estimate_bytes_by_axis: Callable[[Layout, Batching], Mapping[str, float]],
        workers: WorkerGroup,
        get_target_workers: Callable[[], int],
        print_line: Callable[[str], None],
        stop_event: threading.Event,
    ):
        self._config, self._batching, self._estimate_bytes_by_axis = config, batching, estimate_bytes_by_axis
        self._workers, self._get_target_workers = workers, get_target_workers
        self._print_line, self._stop_event = print_line, stop_event
        self._membership: Membership | None = None
        self._generation_batching = batching
        self._last_inputs: tuple[Any, ...] = ()

    def wait_for_membership(self) -> Membership:
        """Wait until the next generation can be formed, and return its membership.

        Workers that together hold the state in memory start at once, even if fewer than the target. Otherwise wait for
        the workers that are starting, each for up to `cluster.start_timeout`, until the target is reached; if none is
        starting, do not wait. Raises RunFailedError if too few are ready then.
        """
        while True:
            candidates, target = self._workers.list_candidates(), self._get_target_workers()
            membership = self._plan(candidates, target)
            is_complete = membership is not None and membership.layout.world_size == target
            if membership is not None and (is_complete or membership.step is not None):
                return membership
            try:
                self._workers.wait_for_workers(len(candidates) + 1)
            except ClusterError as error:
                if membership is None:
                    raise RunFailedError(f"too few workers to continue: {error}") from error
                return membership  # no further worker was ready in time

    def begin_generation(self, membership: Membership) -> Batching:
        """Return the split of the batch over the ranks of a generation. Call before `poll_regroup`."""
        self._membership, self._last_inputs = membership, ()
        self._generation_batching = self._balance(membership, self._workers.list_candidates())
        return self._generation_batching

    def poll_regroup(self) -> RegroupRequest:
        """Return whether to end the current generation and form another one. Called again and again while it runs.

        "pause": more workers are ready, microbatches should be rebalanced, or members leave: their nodes are draining,
        or fewer workers are wanted. "save" if members leave and the state is partitioned: one may hold a part alone.
        None: continue. After a change, also starts workers up to the target, besides spares, and sets `stop_event` if
        draining nodes leave too few.
        """
        membership = self._membership
        if membership is None:
            return None
        candidates, target = self._workers.list_candidates(), self._get_target_workers()
        inputs = (target, len(candidates), [(c.slowdown, c.is_draining) for c in candidates])
        if inputs == self._last_inputs:  # planning takes time
            return None
        self._last_inputs = inputs
        self._workers.scale_up_to(target)
        next_membership = self._plan(candidates, target)  # only its size counts: state is reported between generations
        draining = {c.worker_id for c in candidates if c.is_draining} & set(membership.members)
        if next_membership is None:
            if draining:
                self._print_line("nodes are draining and too few workers remain: saving and stopping")
                self._stop_event.set()
            return None
        size, next_size = membership.layout.world_size, next_membership.layout.world_size
        if draining or next_size < size:
            return "save" if max(compute_state_partition(membership.layout)) else "pause"
        should_rebalance = self._balance(membership, candidates) != self._generation_batching
        return "pause" if next_size > size or should_rebalance else None

    def _plan(self, candidates: list[Candidate], target: int) -> Membership | None:
        return plan_membership(self._config, self._batching, candidates, target, self._estimate_bytes_by_axis)

    def _balance(self, membership: Membership, candidates: list[Candidate]) -> Batching:
        """Return the split of the batch over ranks; slow ranks get fewer microbatches if on_straggler=rebalance."""
        if self._config.fault.on_straggler != "rebalance":
            return self._batching
        slowdown = {candidate.worker_id: candidate.slowdown for candidate in candidates}
        return balance_by_speed(self._batching, membership.layout, [slowdown[member] for member in membership.members])
