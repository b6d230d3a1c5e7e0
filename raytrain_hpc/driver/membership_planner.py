"""Planner of generations: which workers form the next one, and when to end the current one to regroup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.backend import RegroupRequest, WorkerGroup
from raytrain_hpc.driver.wait_report import report_wait
from raytrain_hpc.driver.worker_target import WorkerTarget
from raytrain_hpc.elastic.cluster_following import ARRIVAL_PATIENCE_S
from raytrain_hpc.elastic.load_balancing import balance_by_speed
from raytrain_hpc.elastic.recovery import Candidate, Membership, plan_membership
from raytrain_hpc.elastic.state_partition import compute_state_partition
from raytrain_hpc.errors import ClusterError, RunFailedError
from raytrain_hpc.planner.layout import Batching, Layout

_CLUSTER_POLL_S = 0.5  # between two looks at the cluster while nodes are waited for
_STOP_POLL_S = 0.5  # between two looks whether a stop was requested, while other workers are waited for


class MembershipPlanner:
    """Applies the membership policy (elastic/recovery.py) to the workers of a run.

    `batching`: the microbatches of a step, fixed for the run. `estimate_bytes_by_axis`: as in `plan_membership`.
    `target`: the number of workers that the run should have. `stop_event`: set to save and stop.
    """

    def __init__(
        self,
        config: Config,
        batching: Batching,
        estimate_bytes_by_axis: Callable[[Layout, Batching], Mapping[str, float]],
        workers: WorkerGroup,
        target: WorkerTarget,
        print_line: Callable[[str], None],
        stop_event: threading.Event,
    ):
        self._config, self._batching, self._estimate_bytes_by_axis = config, batching, estimate_bytes_by_axis
        self._workers, self._target = workers, target
        self._print_line, self._stop_event = print_line, stop_event
        self._membership: Membership | None = None
        self._generation_batching = batching
        self._last_inputs: tuple[Any, ...] = ()
        self._num_ready = 0  # while it waits for workers
        self._next_size = 0  # ranks that the next generation would have, if it is larger

    def wait_for_membership(self) -> Membership | None:
        """Wait until the next generation can be formed, and return its membership; None if a stop was requested then.

        Workers that together hold the state in memory start at once, even if fewer than the target. Otherwise wait for
        the workers that are starting, each for up to `cluster.start_timeout`, until the target is reached; if none is
        starting, do not wait. A run that follows its cluster waits for nodes for as long in all, until its minimum is
        reached, and 20 s for more, except for its first generation. Prints what is missing. Raises RunFailedError if
        too few are ready then, or before the first generation ClusterError. If a stop was requested before, it waits
        for no more workers than are needed.
        """
        was_stopping = self._stop_event.is_set()
        membership, is_ready = self._find_membership()
        if is_ready or (membership is not None and was_stopping):
            return membership
        start, timeout_s = time.monotonic(), self._config.cluster.start_timeout
        with report_wait(self._print_line, self._describe_shortage, timeout_s):
            while not is_ready:
                try:
                    self._wait_for_another(membership, time.monotonic() - start)
                except ClusterError as error:
                    if membership is None and self._membership is None and self._workers.get_capacity() is not None:
                        raise
                    if membership is None:
                        raise RunFailedError(f"too few workers to continue: {error}") from error
                    return membership  # no further worker was ready in time
                if self._stop_event.is_set() and not was_stopping:
                    return None
                membership, is_ready = self._find_membership()
                is_ready |= membership is not None and was_stopping
        return membership

    def _find_membership(self) -> tuple[Membership | None, bool]:
        """Return the best membership that the ready workers allow, and whether to form it without waiting for more."""
        capacity, allowance = self._workers.get_capacity(), self._workers.get_allowance()
        target, candidates = self._target.update(capacity, allowance), self._workers.list_candidates()
        self._num_ready = len(candidates)
        membership = self._plan(candidates, target)
        is_complete = membership is not None and membership.layout.world_size == target
        return membership, membership is not None and (is_complete or membership.step is not None)

    def _wait_for_another(self, membership: Membership | None, waited_s: float) -> None:
        """Wait for one more worker, on a cluster that the run follows only for a moment.

        `membership`: the one that is possible already; `waited_s`: seconds that the run has waited. Raises ClusterError
        if none is to be waited for any longer.
        """
        if self._workers.get_capacity() is None:
            self._wait_until_stopping(self._num_ready + 1)
            return
        self._workers.scale_up_to(self._target.value, self._target.wanted)
        end = time.monotonic() + _CLUSTER_POLL_S
        try:
            self._workers.wait_for_workers(self._num_ready + 1, _CLUSTER_POLL_S)
        except ClusterError:
            has_enough = membership is not None and self._membership is not None
            if waited_s > (ARRIVAL_PATIENCE_S if has_enough else self._config.cluster.start_timeout):
                raise
            time.sleep(max(0.0, end - time.monotonic()))  # at once if no worker is starting

    def _wait_until_stopping(self, count: int) -> None:
        """Wait until `count` workers are ready, or a stop is requested. Raises ClusterError as `wait_for_workers`."""
        deadline = time.monotonic() + self._config.cluster.start_timeout
        was_stopping = self._stop_event.is_set()
        while True:
            start = time.monotonic()
            slice_s = max(0.0, min(_STOP_POLL_S, deadline - start))
            try:
                self._workers.wait_for_workers(count, slice_s)
                return
            except ClusterError:
                now = time.monotonic()
                if now < start + slice_s or now >= deadline:  # no worker is to start, or none has started in time
                    raise
                if self._stop_event.is_set() and not was_stopping:
                    return

    def _describe_shortage(self) -> str:
        return f"workers: {self._num_ready} of {self._target.value} are ready"

    def begin_generation(self, membership: Membership) -> Batching:
        """Return the split of the batch over the ranks of a generation. Call before `poll_regroup`."""
        self._membership, self._last_inputs, self._next_size = membership, (), 0
        self._target.record_size(membership.layout.world_size)
        self._generation_batching = self._balance(membership, self._workers.list_candidates())
        return self._generation_batching

    def poll_regroup(self) -> RegroupRequest:
        """Return whether to end the current generation and form another one. Called again and again while it runs.

        "pause": more workers are ready and warm, microbatches should be rebalanced, or members leave: their nodes are
        draining, fewer workers are wanted, or another run has priority. "save" if members leave and the state is
        partitioned: one may hold a part alone; and always with parallel.offload=disk, whose state does not fit into
        memory. None: continue. A run that follows its cluster grows when all new
        workers are ready and its interval has passed. After a change, also starts workers up to the target, besides
        spares, and sets `stop_event` if draining nodes leave too few.
        """
        request = self._find_reason_to_regroup()
        return "save" if request == "pause" and self._config.parallel.offload == "disk" else request

    def _find_reason_to_regroup(self) -> RegroupRequest:
        membership = self._membership
        if membership is None:
            return None
        capacity, allowance = self._workers.get_capacity(), self._workers.get_allowance()
        target, candidates = self._target.update(capacity, allowance), self._workers.list_candidates()
        states = [(candidate.slowdown, candidate.is_draining, candidate.is_cold) for candidate in candidates]
        inputs = (target, self._target.wanted, capacity, allowance, states)
        if inputs == self._last_inputs:  # planning takes time
            return "pause" if self._target.may_grow(self._next_size) else None
        self._last_inputs, self._next_size = inputs, 0
        self._workers.scale_up_to(target, self._target.wanted)
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
        self._next_size = next_size if next_size > size else 0
        should_rebalance = self._balance(membership, candidates) != self._generation_batching
        return "pause" if self._target.may_grow(self._next_size) or should_rebalance else None

    def _plan(self, candidates: list[Candidate], target: int) -> Membership | None:
        membership = self._membership
        config = self._config if membership is None or membership.config is None else membership.config
        return plan_membership(
            config, self._batching, candidates, target, self._estimate_bytes_by_axis, self._target.choose_config
        )

    def _balance(self, membership: Membership, candidates: list[Candidate]) -> Batching:
        """Return the split of the batch over ranks; slow ranks get fewer microbatches if on_straggler=rebalance."""
        if self._config.fault.on_straggler != "rebalance":
            return self._batching
        slowdown = {candidate.worker_id: candidate.slowdown for candidate in candidates}
        return balance_by_speed(self._batching, membership.layout, [slowdown[member] for member in membership.members])
