"""A run from preparation to result, as a sequence of generations: each continues from the state of the last one."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.auto_layout import build_machine, resolve_auto_layout
from raytrain_hpc.driver.backend import ExecutionBackend, RegroupRequest, WorkerGroup
from raytrain_hpc.driver.backend_factory import open_backend
from raytrain_hpc.driver.checkpoint_sampler import CheckpointSampler
from raytrain_hpc.driver.incident_log import IncidentLog
from raytrain_hpc.driver.result import Result
from raytrain_hpc.driver.run_banner import announce_run
from raytrain_hpc.driver.run_recorder import DeviceInfo, RunRecorder
from raytrain_hpc.driver.run_setup import PreparedRun, find_newest_checkpoint, make_paths_absolute, prepare_run
from raytrain_hpc.elastic.load_balancing import balance_by_speed
from raytrain_hpc.elastic.recovery import Candidate, Membership, get_min_workers, plan_membership
from raytrain_hpc.elastic.state_partition import (
    compute_state_partition,
    find_newest_complete_step,
    plan_replication_pairs,
)
from raytrain_hpc.errors import ClusterError, ConfigError, RunDirectoryError, RunFailedError, WorkerFailedError
from raytrain_hpc.observability.console import Console
from raytrain_hpc.observability.experiment_trackers import BackgroundTracker, create_trackers
from raytrain_hpc.observability.peak_flops import get_peak_tflops
from raytrain_hpc.optim.lr_scheduler import should_evaluate
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.placement import Site, describe_placement
from raytrain_hpc.runtime.worker_spec import CustomModel, Script, WorkerSpec


@dataclass(frozen=True)
class _RunContext:
    """What all generations of a run share."""

    prepared: PreparedRun
    lease: Lease
    recorder: RunRecorder
    incidents: IncidentLog
    batching: Batching


class Supervisor:
    """Runs a training through its generations. `stop` may be set from any thread or signal handler."""

    def __init__(self, config: Config, custom: CustomModel | Script | None, console: Console, stop: threading.Event):
        self._config, self._custom, self._console, self._stop_event = config, custom, console, stop
        self._timestamps: dict[str, float] = {"began": time.time()}
        self._restarts = 0
        self._consecutive_failures, self._furthest_step = 0, -1  # without progress; furthest step of any failure
        self._first_generation_infos: list[dict[str, Any]] = []  # host facts of the ranks of the first generation
        self._warned: set[str] = set()
        self._target_workers = 0  # set by `resize`; 0: as many as settings and cluster allow

    def resize(self, workers: int) -> None:
        """Continue with `workers` workers, from a step boundary on, as soon as they are ready; return at once.

        May be called from any thread. Raises ConfigError if cluster.min_workers does not allow so few.
        """
        minimum = get_min_workers(self._config)
        if workers < minimum:
            raise ConfigError("workers", workers, "resize", f"cluster.min_workers allows no fewer than {minimum}")
        self._target_workers = workers

    def run(self) -> Result:
        """Prepare the run, train, and write the result. Raises the RaytrainError that the user should see."""
        prepared = prepare_run(self._config, self._custom, self._print_once)
        with open_backend(self._config) as backend:
            self._timestamps["cluster"] = time.time()
            prepared = resolve_auto_layout(prepared, backend.world_size, backend.cluster, self._console.print_line)
            self._config = prepared.config
            prepared.resolve_layout(backend.world_size)  # refuses an illegal layout before anything is written
            lease = Lease.acquire(prepared.directory.path, owner=f"{self._config.run.name}")
            try:
                with lease.renew_in_background(self._stop_event.set):
                    return self._run_under_lease(prepared, lease, backend)
            finally:
                self._release_lease(lease)

    def _create_trackers(self, backend: ExecutionBackend) -> list[BackgroundTracker]:
        """Return the experiment trackers of the settings, each on a thread of its own."""
        trackers = create_trackers(self._config, self._alarm)
        if backend.uses_existing_cluster and self._config.observe.ray_metrics:
            from raytrain_hpc.driver.ray_metrics import RayMetricsTracker  # imports Ray

            trackers.append(
                BackgroundTracker("ray_metrics", partial(RayMetricsTracker, self._config.run.name), self._alarm)
            )
        return trackers

    def _alarm(self, text: str) -> None:
        self._console.print_line(f"alarm: {text}")

    def _print_once(self, text: str) -> None:
        """Print a line once, although preparation and every generation check the same checkpoints."""
        if text not in self._warned:
            self._warned.add(text)
            self._console.print_line(text)

    def _release_lease(self, lease: Lease) -> None:
        """Release the lease. A failure to do so is an alarm, since the run itself has ended."""
        try:
            lease.release()
        except RunDirectoryError as error:  # another driver holds it, or the disk is full
            self._console.print_line(f"alarm: {error}")

    def _run_under_lease(self, prepared: PreparedRun, lease: Lease, backend: ExecutionBackend) -> Result:
        """Train, record, and write the result. Call while this driver holds the lease of the run directory."""
        layout, batching = prepared.resolve_layout(backend.world_size)
        announce_run(
            prepared, layout, batching, build_machine(backend.world_size, backend.cluster), self._console.print_line
        )
        prepared.store.remove_leftovers()
        sampler = CheckpointSampler(self._config, self._console.print_line, self._alarm)
        recorder = RunRecorder(
            self._config,
            prepared.directory,
            self._console,
            prepared.store,
            lease,
            prepared.make_checkpoint_metadata(batching),
            None if self._custom else compute_flops_per_token(prepared.model_spec, self._config.train.seq_len),
            self._create_trackers(backend),
            sampler.on_published,
        )
        run = _RunContext(prepared, lease, recorder, IncidentLog(prepared.directory), batching)
        self._target_workers = self._target_workers or backend.world_size
        try:
            outcome = "done" if self._is_already_trained(run) else self._run_generations(run, backend)
        finally:
            self._console.stop_progress()
            recorder.close(failed=sys.exc_info()[0] is not None)
        if outcome == "stopped" and recorder.totals.save_error:
            raise RunFailedError(f"stopped without a checkpoint: {recorder.totals.save_error}")
        result = self._build_result(layout, recorder, outcome)
        prepared.directory.write_result(result.to_json())
        sampler.close()
        return result

    def _is_already_trained(self, run: _RunContext) -> bool:
        """Return whether the newest checkpoint is at the last step and has been evaluated."""
        newest, steps = find_newest_checkpoint(run.prepared.store, self._print_once), self._config.train.steps
        if newest is None or newest.step < steps or self._find_pending_eval_metrics(run, newest.step) is not None:
            return False
        self._console.print_line(f"already trained: {newest.path} is at step {newest.step} of {steps}")
        run.recorder.totals.checkpoint_path = str(newest.path)
        return True

    def _run_generations(self, run: _RunContext, backend: ExecutionBackend) -> str:
        """Run generations until one ends as "done", or as "stopped" on request; return that outcome.

        After a failure or a request to regroup, the next generation is formed from the workers then available.
        """
        workers = self._start_worker_group(backend)
        try:
            while True:
                membership = self._wait_for_membership(run, workers)
                try:
                    outcome = self._run_generation(run, workers, membership)
                except WorkerFailedError as failure:
                    self._handle_failure(run, workers, failure)
                else:
                    if outcome == "done" or (outcome == "stopped" and self._stop_event.is_set()):
                        return outcome
                    if outcome == "lost":
                        workers.discard_state()
                run.lease.next_generation()
        finally:
            workers.close()

    def _start_worker_group(self, backend: ExecutionBackend) -> WorkerGroup:
        """Create the worker group of the run and start it. Raises ClusterError if the workers do not start."""
        workers = backend.create_worker_group(self._config)
        try:
            workers.start()
        except ClusterError:
            workers.close()
            raise
        self._timestamps["actors"] = time.time()
        return workers

    def _wait_for_membership(self, run: _RunContext, workers: WorkerGroup) -> Membership:
        """Return the membership of the next generation, as soon as one is possible.

        It can be smaller if its members hold the state in memory; otherwise wait for all workers until the timeout.
        """
        while True:
            candidates = workers.list_candidates()
            membership = plan_membership(
                self._config, run.batching, candidates, self._target_workers, run.prepared.estimate_comm_bytes
            )
            complete = membership is not None and membership.layout.world_size == self._target_workers
            if membership is not None and (complete or membership.step is not None):
                return membership
            try:
                workers.wait_for_workers(len(candidates) + 1)
            except ClusterError as error:
                if membership is not None:  # no more workers will start
                    return membership
                raise RunFailedError(f"gave up after {self._restarts} failures: {error}") from error

    def _run_generation(self, run: _RunContext, workers: WorkerGroup, membership: Membership) -> str:
        """Run one generation from the step in memory, the newest checkpoint or initial weights; return its outcome."""
        prepared, recorder, layout = run.prepared, run.recorder, membership.layout
        batching = self._balance_microbatches(run, membership, workers.list_candidates())
        infos = workers.set_members(membership.members)
        if self._first_generation_infos and membership.step is None:
            self._console.print_line("no complete state in memory; resuming from the newest checkpoint")
        sites = [Site(info["rack"], info["node"]) for info in infos]
        if len(set(sites)) > 1:
            self._console.print_line(f"placed  {describe_placement(layout, sites)}")
        self._first_generation_infos = self._first_generation_infos or infos
        newest = None if membership.step is not None else find_newest_checkpoint(prepared.store, self._print_once)
        step = membership.step if membership.step is not None else 0 if newest is None else newest.step
        self._write_workers(run, layout, infos)
        recorder.begin_generation(
            run.lease.generation, layout.world_size, get_device_info(self._config, infos[0]), step
        )
        if newest is not None:
            self._console.print_line(f"resumed from {newest.path}: step {step} of {self._config.train.steps}")
            recorder.totals.checkpoint_path = str(newest.path)
        elif membership.step is None and prepared.init_checkpoint is not None:
            self._console.print_line(f"initial weights from {prepared.init_checkpoint}")
        self._console.start_progress(self._config.train.steps, step)
        spec = WorkerSpec(
            config=make_paths_absolute(self._config),
            layout=layout,
            batching=batching,
            model_spec=prepared.model_spec,
            custom=self._custom,
            generation=run.lease.generation,
            resume_step=None if newest is None else step,
            memory_step=membership.step,
            end_step=self._config.train.steps,
            pending_eval_metrics=self._find_pending_eval_metrics(run, step),
            has_pending_checkpoint=membership.step is not None and self._is_checkpoint_missing(run, step),
            init_checkpoint=prepared.init_checkpoint,
            replication_pairs=plan_replication_pairs(layout, sites) if self._config.checkpoint.buddies else (),
            is_single_node=len({site.node for site in sites}) == 1,
        )
        run.incidents.record_resumption(step, layout.world_size)
        poll_regroup = self._build_regroup_poll(run, workers, membership, batching)
        return workers.run_generation(spec, partial(self._handle_record, run), self._stop_event, poll_regroup)

    def _build_regroup_poll(
        self, run: _RunContext, workers: WorkerGroup, membership: Membership, batching: Batching
    ) -> Callable[[], RegroupRequest]:
        """Build the function that the worker group polls during a generation, to ask whether to end it and regroup.

        Reasons are new workers, a resize, draining nodes, and stragglers to rebalance. The answer is "pause", "save" if
        the remaining workers may not hold the whole state, or None to continue.
        """
        last_inputs: tuple[Any, ...] = ()

        def poll_regroup() -> RegroupRequest:
            nonlocal last_inputs
            candidates = workers.list_candidates()
            inputs = (self._target_workers, len(candidates), [(c.slowdown, c.is_draining) for c in candidates])
            if inputs == last_inputs:  # planning takes time, and nothing that it depends on has changed
                return None
            last_inputs = inputs
            workers.scale_up_to(self._target_workers)
            next_membership = plan_membership(
                self._config, run.batching, candidates, self._target_workers, run.prepared.estimate_comm_bytes
            )
            draining = {candidate.worker_id for candidate in candidates if candidate.is_draining} & set(
                membership.members
            )
            if next_membership is None:
                if draining:
                    self._console.print_line("nodes are draining and too few workers remain: saving and stopping")
                    self._stop_event.set()
                return None
            if draining or next_membership.layout.world_size < membership.layout.world_size:
                return "save" if max(compute_state_partition(membership.layout)) else "pause"
            larger = next_membership.layout.world_size > membership.layout.world_size
            return "pause" if larger or self._balance_microbatches(run, membership, candidates) != batching else None

        return poll_regroup

    def _balance_microbatches(self, run: _RunContext, membership: Membership, candidates: list[Candidate]) -> Batching:
        """Return the microbatches of the step, fewer for slow ranks if fault.on_straggler=rebalance."""
        if self._config.fault.on_straggler != "rebalance":
            return run.batching
        slowdown = {candidate.worker_id: candidate.slowdown for candidate in candidates}
        return balance_by_speed(run.batching, membership.layout, [slowdown[member] for member in membership.members])

    def _find_pending_eval_metrics(self, run: _RunContext, step: int) -> dict[str, Any] | None:
        """Return the metrics of `step` if its evaluation is due and was interrupted, otherwise None."""
        train = self._config.train
        if not step or run.prepared.dataset.val is None or not should_evaluate(train, step, train.steps):
            return None
        if isinstance(self._custom, Script):  # a script evaluates by itself
            return None
        last_metrics = run.recorder.totals.last_metrics
        metrics = last_metrics if last_metrics.get("step") == step else run.prepared.directory.read_step_metrics(step)
        return None if metrics is None or "val/loss" in metrics else metrics

    def _is_checkpoint_missing(self, run: _RunContext, step: int) -> bool:
        """Return whether a checkpoint of `step` is due and was not published."""
        interval = self._config.checkpoint.every
        is_due = step == self._config.train.steps or (step and interval and step % interval == 0)
        return bool(is_due) and step not in run.prepared.store.list_steps()

    def _handle_record(self, run: _RunContext, record: dict[str, Any]) -> None:
        """Log an incident, or pass the record to the recorder and report a recovery that its step completes."""
        previous_step = run.recorder.committed_step
        if record["type"] == "incident":
            run.incidents.record_incident(record, run.lease.generation, previous_step)
            self._console.print_line(f"{record['operation']}: {record['reason']}")
            return
        run.recorder.handle_record(record)
        if (
            run.recorder.committed_step > previous_step
            and (incident := run.incidents.record_commit(record["metrics"]["time/unix"])) is not None
        ):
            self._console.print_line(
                f"recovered: rank {incident['rank']} {incident['kind']} at step {incident['step'] + 1}; "
                f"{incident['world']} -> {incident['world_after']} ranks; "
                f"{incident['steps_lost']} steps lost; {incident['recovered_s']:.1f} s"
            )

    def _handle_failure(self, run: _RunContext, workers: WorkerGroup, failure: WorkerFailedError) -> None:
        """Record a failed generation and its last steps. Raises RunFailedError past fault.max_failures."""
        newest = find_newest_complete_step(candidate.state_parts for candidate in workers.list_candidates())
        for metrics in workers.recall_metrics(run.recorder.committed_step, newest) if newest is not None else ():
            run.recorder.handle_record({"type": "step", "metrics": metrics})
        step = run.recorder.committed_step
        self._restarts += 1
        self._consecutive_failures = self._consecutive_failures + 1 if step <= self._furthest_step else 1
        self._furthest_step = max(step, self._furthest_step)
        run.incidents.record_failure(failure, run.lease.generation, step, run.recorder.world_size)
        if self._consecutive_failures > self._config.fault.max_failures:
            raise RunFailedError(
                f"gave up after {self._consecutive_failures} failures "
                f"(fault.max_failures={self._config.fault.max_failures}): {failure}"
            ) from failure
        self._console.print_line(f"worker failed: {failure}; {step} steps are committed")

    def _write_workers(self, run: _RunContext, layout: Layout, infos: list[dict[str, Any]]) -> None:
        """Write workers.json for the ranks of this generation."""
        keys = ("rank", "pid", "node", "host", "device")
        workers = [
            {key: info[key] for key in keys} | {"coordinates": layout.get_coordinates(info["rank"])} for info in infos
        ]
        run.prepared.directory.write_workers(run.lease.generation, workers)

    def _build_result(self, layout: Layout, recorder: RunRecorder, outcome: str) -> Result:
        """Return the result of the run, from the totals over all its generations."""
        totals, wall_s = recorder.totals, time.time() - self._timestamps["began"]
        return Result(
            outcome=outcome,
            train_loss=totals.last_metrics.get("train/loss"),
            val_loss=totals.val_loss,
            best_val_loss=totals.best_val_loss,
            steps=totals.last_metrics.get("step", 0),
            tokens=totals.last_metrics.get("train/tokens", 0),
            wall_s=wall_s,
            goodput=totals.productive_step_s / wall_s,
            restarts=self._restarts,
            layout=asdict(layout),
            checkpoint=totals.checkpoint_path,
            run_dir=self._config.run.dir,
            startup=self._compute_startup_times(recorder),
        )

    def _compute_startup_times(self, recorder: RunRecorder) -> dict[str, float]:
        """Return the seconds of each phase of the startup, until the first committed step, for the slowest worker."""
        if not recorder.ready_records or recorder.totals.first_step_unix is None:
            return {}
        began, cluster = self._timestamps["began"], self._timestamps["cluster"]
        imported = max(info["imported"] for info in self._first_generation_infos)
        actors_started = max(info["began"] for info in self._first_generation_infos)
        built = max(record["model"] for record in recorder.ready_records.values())
        ends = {
            "cluster_s": cluster,
            "actors_s": actors_started,
            "imports_s": imported,
            "model_s": built,
            "first_step_s": recorder.totals.first_step_unix,
        }
        seconds, previous_end = {}, began
        for name, end in ends.items():
            seconds[name], previous_end = max(0.0, end - previous_end), max(previous_end, end)
        return seconds | {"total_s": recorder.totals.first_step_unix - began}


def get_device_info(config: Config, info: dict[str, Any]) -> DeviceInfo:
    """Return peak TFLOP/s, from the settings or looked up by name, and memory of a worker's device."""
    peak = config.observe.peak_tflops
    peak_flops = get_peak_tflops(info["device"], config.train.dtype) if peak == "auto" else float(peak)
    return DeviceInfo(peak_flops, info["memory_gib"])
