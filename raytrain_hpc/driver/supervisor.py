"""Supervisor of a run, from preparation to result: a sequence of generations, each with a fixed set of ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from raytrain_hpc.callbacks.callback import Callback, DriverCallback, DriverControl
from raytrain_hpc.callbacks.plugins import prepare_callbacks
from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.auto_layout import build_machine, estimate_run, refit_activation_memory, resolve_for_backend
from raytrain_hpc.driver.backend import ExecutionBackend, WorkerGroup
from raytrain_hpc.driver.backend_factory import open_backend
from raytrain_hpc.driver.checkpoint_finder import CheckpointFinder, ResumePoint
from raytrain_hpc.driver.checkpoint_sampler import CheckpointSampler
from raytrain_hpc.driver.deadline_monitor import DeadlineMonitor
from raytrain_hpc.driver.driver_callbacks import start_driver_callbacks
from raytrain_hpc.driver.finished_run import find_pending_eval_metrics, find_step_metrics, load_finished_run
from raytrain_hpc.driver.incident_log import IncidentLog
from raytrain_hpc.driver.job_deadline import find_deadline
from raytrain_hpc.driver.layout_chooser import LayoutChooser
from raytrain_hpc.driver.mailbox import Mailbox
from raytrain_hpc.driver.membership_planner import MembershipPlanner
from raytrain_hpc.driver.resize_request import ResizeListener
from raytrain_hpc.driver.result import Result
from raytrain_hpc.driver.result_builder import build_result
from raytrain_hpc.driver.run_banner import announce_run, build_plan_record, compute_state_bytes_per_rank
from raytrain_hpc.driver.run_recorder import RunRecorder, get_device_info
from raytrain_hpc.driver.run_setup import PreparedRun, make_paths_absolute, prepare_run
from raytrain_hpc.driver.saved_state import SavedState, recall_missed_metrics
from raytrain_hpc.driver.worker_target import WorkerTarget
from raytrain_hpc.elastic.deadline import Deadline, assume_save_s
from raytrain_hpc.elastic.failure_budget import FailureCount, count_worker_failure, find_exceeded_limit
from raytrain_hpc.elastic.recovery import Membership
from raytrain_hpc.elastic.state_partition import plan_replication_pairs
from raytrain_hpc.errors import (
    CheckpointCorruptedError,
    CheckpointError,
    ClusterError,
    RunFailedError,
    WorkerFailedError,
)
from raytrain_hpc.observability.console import Console, format_incident, format_recovery
from raytrain_hpc.optim.lr_scheduler import LearningRate, LRSchedule
from raytrain_hpc.planner.flops import compute_flops_per_token
from raytrain_hpc.planner.hardware import Machine
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.placement import Site, count_max_ranks_per_node, describe_placement
from raytrain_hpc.runtime.worker_spec import CustomModel, Script, WorkerSpec


@dataclass(frozen=True)
class _RunContext:
    """Objects shared by all generations of a run."""

    given: PreparedRun  # with the settings that the user gave
    prepared: PreparedRun  # with what the planner has chosen
    lease: Lease
    recorder: RunRecorder
    incidents: IncidentLog
    saved: SavedState
    batching: Batching
    deadline: DeadlineMonitor
    refit: Callable[[Config, Layout], Config]  # see `refit_activation_memory`


class Supervisor:
    """Driver of one run.

    Setting `stop`, from any thread or signal handler, saves and stops after the current step. Between generations, the
    next one is formed only if a newer state than that of the newest checkpoint is in memory, and only saves it; before
    any state exists, it trains one step.
    """

    def __init__(
        self,
        config: Config,
        custom: CustomModel | Script | None,
        console: Console,
        stop: threading.Event,
        callbacks: Sequence[Callback | DriverCallback] = (),
        lr_schedule: LRSchedule | None = None,
    ):
        """Check callbacks and schedule. Raises CallbackError or ConfigError."""
        LearningRate(config, lr_schedule)(0)
        self._lr_schedule = lr_schedule
        self._rank_callbacks, self._driver_callbacks = prepare_callbacks(config, callbacks)
        self._config, self._custom, self._console, self._stop_event = config, custom, console, stop
        self._timestamps: dict[str, float] = {"began": time.time()}
        self._deadline: Deadline | None = None
        self._restarts = 0
        self._failure_count = FailureCount()
        self._first_generation_infos: list[dict[str, Any]] = []  # host facts by rank
        self._warned: set[str] = set()
        self._write_start_files: Callable[[], None] | None = None  # until settings and plan are recorded
        self._target = WorkerTarget(config, console.print_line)

    def resize(self, workers: int | Literal["auto"]) -> None:
        """Set the target number of workers; return at once.

        Missing workers are started while a generation runs; none with `cluster.workers=0`. From a step boundary on, the
        largest legal number of ready workers up to the target trains; others become spares. A run that follows its
        cluster (`cluster.workers=auto`) keeps this number until it is resized to "auto". May be called from any thread.
        Raises ConfigError below `cluster.min_workers` (auto: one model replica) or above `cluster.max_workers`.
        """
        self._target.resize(workers)

    def run(self) -> Result:
        """Prepare the run, train, and write the result. Raises the RaytrainError that the user should see."""
        self._deadline = find_deadline(self._config, os.environ, self._timestamps["began"])
        prepared = prepare_run(self._config, self._custom, self._print_once)
        if (finished := load_finished_run(prepared)) is not None:
            self._console.print_line(
                f"already trained: {self._config.run.dir} is at step {finished.steps} of {self._config.train.steps}"
            )
            return finished
        with open_backend(self._config, self._console, self._stop_event) as backend:
            self._timestamps["cluster"] = time.time()
            given, prepared = prepared, resolve_for_backend(prepared, backend, self._console.print_line)
            self._config = prepared.config
            lease = Lease.acquire(prepared.directory.location, owner=self._config.run.name)
            with lease.hold(self._stop_event.set, self._alarm), prepared.directory.keep_uploaded():
                return self._run_under_lease(given, prepared, lease, backend)

    def _alarm(self, text: str) -> None:
        self._console.print_line(f"alarm: {text}")

    def _print_once(self, text: str) -> None:
        """Print a text unless it was printed before: preparation and every generation check the same checkpoints."""
        if text and text not in self._warned:
            self._warned.add(text)
            self._console.print_line(text)

    def _run_under_lease(
        self, given: PreparedRun, prepared: PreparedRun, lease: Lease, backend: ExecutionBackend
    ) -> Result:
        """Train, record, and write the result. Call while this driver holds the lease of the run directory."""
        layout, batching = prepared.resolve_layout(backend.world_size)
        self._announce(prepared, layout, batching, build_machine(backend.world_size, backend.cluster))
        try:
            prepared.store.remove_leftovers()
        except CheckpointError as error:
            self._alarm(f"{error}; the run continues")
        sampler = CheckpointSampler(self._config, prepared.directory, self._console.print_line, self._alarm)
        assumed_save_s = assume_save_s(compute_state_bytes_per_rank(prepared, layout))
        deadline = DeadlineMonitor(self._deadline, assumed_save_s, self._stop_event, self._console.print_line)

        def on_published(step: int, seconds: float) -> None:
            sampler.on_published(step)
            deadline.record_save(seconds)

        control, has_dashboard = DriverControl(self._stop_event.set, self.resize), backend.uses_existing_cluster
        callbacks = start_driver_callbacks(self._config, self._driver_callbacks, control, self._alarm, has_dashboard)
        recorder = RunRecorder(
            self._config,
            prepared.directory,
            self._console,
            prepared.store,
            lease,
            prepared.make_checkpoint_metadata(batching),
            None if self._custom else compute_flops_per_token(prepared.model_spec, self._config.train.seq_len),
            callbacks,
            on_published,
            prepared.local_catalog,
        )
        incidents = IncidentLog(prepared.directory, partial(callbacks.call, "on_incident"))
        finder = CheckpointFinder(self._config, prepared.store, prepared.local_catalog, self._print_once)
        saved = SavedState(self._config, prepared.store, prepared.local_catalog, finder, recorder, lease)
        refit = partial(refit_activation_memory, given, batching, backend.cluster, self._print_once)
        run = _RunContext(given, prepared, lease, recorder, incidents, saved, batching, deadline, refit)
        listener = ResizeListener(Mailbox(prepared.directory.location), self.resize, lambda: self._target.value)
        outcome = "failed"
        try:
            with deadline.watch(), listener.listen():
                outcome = self._run_generations(run, backend)
        finally:
            self._console.stop_progress()
            try:
                recorder.close()
            finally:
                callbacks.close(outcome)
        recorder.raise_error()
        callbacks.raise_error()
        if outcome == "stopped" and recorder.totals.save_error:
            raise RunFailedError(f"stopped, but the last checkpoint was not saved: {recorder.totals.save_error}")
        result = build_result(
            self._config, layout, recorder, outcome, self._restarts, self._timestamps, self._first_generation_infos
        )
        prepared.directory.write_result(result.to_json())
        sampler.close()
        return result

    def _announce(self, prepared: PreparedRun, layout: Layout, batching: Batching, machine: Machine) -> None:
        """Print the summary of the run, and record settings and plan in its directory.

        If the directory holds a run already, its files are replaced only when this start has trained a step.
        """
        estimate = estimate_run(prepared, layout, batching, machine)
        announce_run(prepared, layout, batching, machine, estimate, self._console.print_line)
        plan = build_plan_record(prepared, layout, batching, machine, estimate)
        tokenizer = None if prepared.dataset.tokenizer is None else prepared.dataset.tokenizer.to_json()
        self._write_start_files = partial(prepared.directory.write_start, self._config, plan, tokenizer)
        if not prepared.directory.metrics.exists() and prepared.newest_checkpoint is None:
            self._record_start()

    def _record_start(self) -> None:
        """Write the files of the start unless they were written. Call when a step was committed."""
        if self._write_start_files is not None:
            self._write_start_files()
            self._write_start_files = None

    def _run_generations(self, run: _RunContext, backend: ExecutionBackend) -> str:
        """Run generations until one ends as "done", or as "stopped" while a stop is requested; return that outcome.

        The next generation is formed after a failure, and after a pause or save to regroup. It resumes from the newest
        step that its members hold together in memory, after a failure even if a checkpoint is newer. If they hold none,
        after "lost" (part of the state is in no memory), "damaged" (the checkpoint was), and a save that is newer than
        memory, it starts from the newest checkpoint, or initial weights.
        """
        workers = self._start_worker_group(backend)
        chooser = None
        if backend.follows_cluster:
            chooser = LayoutChooser(run.given, self._config, run.batching, backend, self._console.print_line)
        self._target.begin(self._config, run.batching, backend.world_size, chooser)
        planner = MembershipPlanner(
            self._config,
            run.batching,
            run.prepared.estimate_comm_bytes,
            workers,
            self._target,
            self._console.print_line,
            self._stop_event,
        )
        try:
            while not (self._stop_event.is_set() and run.saved.is_saved(workers)):
                membership = planner.wait_for_membership()
                if membership is None:  # a stop was requested meanwhile
                    continue
                try:
                    outcome = self._run_generation(run, workers, planner, membership)
                except WorkerFailedError as failure:
                    self._handle_failure(run, workers, failure)
                else:
                    if outcome == "done":
                        self._finish_local_tier(run, workers)
                    if outcome == "done" or (outcome == "stopped" and self._stop_event.is_set()):
                        return outcome
                    if outcome in ("lost", "damaged") or (
                        outcome == "stopped" and run.saved.is_memory_outdated(workers)
                    ):
                        workers.discard_state()
                run.lease.next_generation()  # a new number: shards that earlier generations report are ignored
            return "stopped"
        finally:
            workers.close()

    def _finish_local_tier(self, run: _RunContext, workers: WorkerGroup) -> None:
        """Delete the checkpoints in node-local storage. Call when the run is done."""
        try:
            run.saved.remove_local_checkpoints(workers)
        except CheckpointError as error:
            self._alarm(f"{error}; the run is done")

    def _start_worker_group(self, backend: ExecutionBackend) -> WorkerGroup:
        """Create the worker group of the run and start it. Raises ClusterError if the workers do not start."""
        workers = backend.create_worker_group(make_paths_absolute(self._config))
        try:
            workers.start()
        except ClusterError:
            workers.close()
            raise
        return workers

    def _run_generation(
        self, run: _RunContext, workers: WorkerGroup, planner: MembershipPlanner, membership: Membership
    ) -> str:
        """Run one generation from the step in memory, the newest checkpoint or initial weights; return its outcome."""
        prepared, recorder, layout = run.prepared, run.recorder, membership.layout
        batching = planner.begin_generation(membership)
        infos = workers.set_members(membership.members)
        if self._first_generation_infos and membership.step is None:
            self._console.print_line(
                "no complete state in memory: starting from the newest checkpoint, or from initial weights"
            )
        sites = [Site(info["rack"], info["node_id"]) for info in infos]
        if len(set(sites)) > 1:
            self._console.print_line(f"placed  {describe_placement(layout, sites)}")
        self._first_generation_infos = self._first_generation_infos or infos
        newest = None if membership.step is not None else run.saved.find_resume_point(workers, infos)
        step = membership.step if membership.step is not None else 0 if newest is None else newest.step
        prepared.directory.write_workers(run.lease.generation, layout, infos, self._target.holder)
        recorder.begin_generation(
            run.lease.generation, layout.world_size, get_device_info(self._config, infos[0]), step
        )
        if newest is not None:
            self._console.print_line(f"resumed from {newest.describe()}: step {step} of {self._config.train.steps}")
            if newest.local is None:
                recorder.totals.checkpoint_path = str(newest.checkpoint.path)
        elif membership.step is None and prepared.init_checkpoint is not None:
            self._console.print_line(f"initial weights from {prepared.init_checkpoint}")
        self._console.start_progress(self._config.train.steps, step)
        only_saves = self._stop_event.is_set() and membership.step is not None and step < self._config.train.steps
        spec = self._build_spec(run, membership, batching, sites, newest, step, only_saves=only_saves)
        run.incidents.record_resumption(step, layout.world_size)
        on_record = partial(self._handle_record, run)
        try:
            outcome = workers.run_generation(spec, on_record, self._stop_event, planner.poll_regroup)
        except CheckpointCorruptedError as error:
            if newest is None or recorder.committed_step > step:
                raise
            run.saved.exclude(newest, error)  # a rank has read what does not match the manifest
            return "damaged"
        return "stopped" if only_saves and outcome == "done" else outcome

    def _build_spec(
        self,
        run: _RunContext,
        membership: Membership,
        batching: Batching,
        sites: Sequence[Site],
        newest: ResumePoint | None,
        step: int,
        *,
        only_saves: bool,
    ) -> WorkerSpec:
        prepared, recorder, last_metrics = run.prepared, run.recorder, run.recorder.totals.last_metrics
        is_unpublished = step > 0 and (newest is None or newest.local is not None)
        return WorkerSpec(
            config=make_paths_absolute(run.refit(membership.config or self._config, membership.layout)),
            layout=membership.layout,
            batching=batching,
            model_spec=prepared.model_spec,
            dataset_hash=prepared.dataset.dataset_hash,
            custom=self._custom,
            generation=run.lease.generation,
            callbacks=self._rank_callbacks,
            lr_schedule=self._lr_schedule,
            start_metrics=find_step_metrics(prepared, step, last_metrics)
            if self._rank_callbacks or isinstance(self._custom, Script)
            else None,
            resume_step=None if newest is None else step,
            local_checkpoint=None if newest is None else newest.local,
            listed_local_checkpoints=run.saved.listed_local_names,
            memory_step=membership.step,
            end_step=step if only_saves else self._config.train.steps,
            pending_eval_metrics=None if only_saves else find_pending_eval_metrics(prepared, step, last_metrics),
            has_pending_checkpoint=only_saves or (is_unpublished and run.saved.is_checkpoint_missing(step)),
            init_checkpoint=prepared.init_checkpoint,
            replication_pairs=plan_replication_pairs(membership.layout, sites)
            if self._config.checkpoint.replicate_snapshots
            else (),
            last_checkpoint_time=max(self._timestamps["began"], recorder.newest_checkpoint_time),
            verified_step=recorder.verified_step,
            max_ranks_per_node=count_max_ranks_per_node(sites),
        )

    def _handle_record(self, run: _RunContext, record: dict[str, Any]) -> None:
        """Log an incident; pass any other record on. If it commits the first step after a failure, print its cost."""
        previous_step = run.recorder.committed_step
        if record["type"] == "incident":
            run.incidents.record_incident(record, run.lease.generation, previous_step)
            what, device = format_incident(record | {"step": previous_step}), record.get("device")
            self._console.print_line(f"incident: {what}: {record['reason']}" + f" (GPU: {device})" * bool(device))
            return
        run.recorder.handle_record(record)
        if record["type"] == "ready":
            run.incidents.record_ready(record)
        if record["type"] == "step":
            run.deadline.record_step(record["metrics"]["time/step_s"])
        if run.recorder.committed_step == previous_step:
            return
        self._record_start()
        if (incident := run.incidents.record_commit(record["metrics"])) is not None:
            self._console.print_line(format_recovery(incident, verbose=self._config.logging.verbose))

    def _handle_failure(self, run: _RunContext, workers: WorkerGroup, failure: WorkerFailedError) -> None:
        """Record a failed generation, with the steps that the driver had not fetched from its ranks.

        Raises RunFailedError if it exceeds the limit of failures or of preemptions in a row, which are counted from the
        last one by which the furthest committed step had advanced, or would be repeated by another attempt.
        """
        for metrics in recall_missed_metrics(workers, run.recorder.committed_step):
            run.recorder.handle_record({"type": "step", "metrics": metrics})
        step = run.recorder.committed_step
        run.saved.distrust_newer(failure, run.lease.generation)
        self._restarts += 1
        has_trained = run.recorder.totals.first_step_unix is not None
        self._failure_count = count_worker_failure(self._failure_count, failure, step, has_trained=has_trained)
        run.incidents.record_failure(failure, run.lease.generation, step, run.recorder.world_size)
        self._print_once(failure.traceback)
        if (exceeded := find_exceeded_limit(self._config, self._failure_count)) is not None:
            raise RunFailedError(f"gave up after {exceeded}: {failure}") from failure.with_traceback(None)
        self._console.print_line(f"worker failed: {failure}; {step} steps are committed")
