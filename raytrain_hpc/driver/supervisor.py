"""One run from its preparation to its result: generations of workers, each going on from the one before."""

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
from raytrain_hpc.driver.backend import ExecutionBackend, RegroupRequest, WorkerGroup, open_backend
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
    """Carries a run through its generations. `stop` may be set from any thread or signal handler."""

    def __init__(
        self, config: Config, custom: CustomModel | Script | None, console: Console, stop_event: threading.Event
    ):
        self._config, self._custom, self._console, self._stop_event = config, custom, console, stop_event
        self._timestamps: dict[str, float] = {"began": time.time()}
        self._restarts = 0
        self._consecutive_failures, self._furthest_step = 0, -1  # failures, and the step that none of them was beyond
        self._initial_workers: list[dict[str, Any]] = []  # of the first generation
        self._warned: set[str] = set()
        self._target_workers = 0  # workers; 0: as many as the settings and the cluster say

    def resize(self, workers: int) -> None:
        """Go on with this many workers from the next step boundary on, or as soon as they are there. Any thread's.

        Raises ConfigError for fewer than the run may shrink to.
        """
        least = get_min_workers(self._config)
        if workers < least:
            raise ConfigError("workers", workers, "resize", f"cluster.min_workers allows no fewer than {least}")
        self._target_workers = workers

    def run(self) -> Result:
        """Prepare, train, and write the result. Raises what a user should see."""
        prepared = prepare_run(self._config, self._custom, self._warn)
        with open_backend(self._config) as fleet:
            self._timestamps["cluster"] = time.time()
            prepared = resolve_auto_layout(prepared, fleet.world, fleet.cluster, self._console.print_line)
            self._config = prepared.config
            prepared.resolve_layout(
                fleet.world
            )  # the last thing that can be wrong with the settings: nothing is written yet
            lease = Lease.acquire(prepared.directory.path, owner=f"{self._config.run.name}")
            try:
                with lease.renew_in_background(self._stop_event.set):
                    return self._run_under_lease(prepared, lease, fleet)
            finally:
                self._release_lease(lease)

    def _create_trackers(self, backend: ExecutionBackend) -> list[BackgroundTracker]:
        found = create_trackers(self._config, self._alarm)
        if backend.is_external and self._config.observe.ray_metrics:
            from raytrain_hpc.driver.ray_metrics import RayMetricsTracker  # Ray is there, then

            found.append(
                BackgroundTracker("ray_metrics", partial(RayMetricsTracker, self._config.run.name), self._alarm)
            )
        return found

    def _alarm(self, text: str) -> None:
        self._console.print_line(f"alarm: {text}")

    def _warn(self, text: str) -> None:
        """Print a line once: preparation and every generation look at the same checkpoints."""
        if text not in self._warned:
            self._warned.add(text)
            self._console.print_line(text)

    def _release_lease(self, lease: Lease) -> None:
        try:
            lease.release()
        except RunDirectoryError as error:  # lost to another driver, or no space left: the run itself has ended
            self._console.print_line(f"alarm: {error}")

    def _run_under_lease(self, prepared: PreparedRun, lease: Lease, backend: ExecutionBackend) -> Result:
        layout, batching = prepared.resolve_layout(backend.world)
        announce_run(
            prepared, layout, batching, build_machine(backend.world, backend.cluster), self._console.print_line
        )
        prepared.store.remove_leftovers()
        samples = CheckpointSampler(self._config, self._console.print_line, self._alarm)
        recorder = RunRecorder(
            self._config,
            prepared.directory,
            self._console,
            prepared.store,
            lease,
            prepared.make_checkpoint_metadata(batching),
            None if self._custom else compute_flops_per_token(prepared.model_spec, self._config.train.seq_len),
            self._create_trackers(backend),
            samples.on_published,
        )
        run = _RunContext(prepared, lease, recorder, IncidentLog(prepared.directory), batching)
        self._target_workers = self._target_workers or backend.world
        try:
            outcome = "done" if self._is_already_trained(run) else self._run_generations(run, backend)
        finally:
            self._console.stop_progress()
            recorder.close(failed=sys.exc_info()[0] is not None)
        if outcome == "stopped" and recorder.totals.save_error:
            raise RunFailedError(f"stopped without a checkpoint: {recorder.totals.save_error}")
        result = self._build_result(layout, recorder, outcome)
        prepared.directory.write_result(result.to_json())
        samples.close()
        return result

    def _is_already_trained(self, run: _RunContext) -> bool:
        newest, steps = find_newest_checkpoint(run.prepared.store, self._warn), self._config.train.steps
        if newest is None or newest.step < steps or self._find_unevaluated_metrics(run, newest.step) is not None:
            return False
        self._console.print_line(f"already trained: {newest.path} is at step {newest.step} of {steps}")
        run.recorder.totals.checkpoint_path = str(newest.path)
        return True

    def _run_generations(self, run: _RunContext, backend: ExecutionBackend) -> str:
        """Generation after generation, until one has done what there was to do or was stopped."""
        crew = self._start_worker_group(backend)
        try:
            while True:
                formation = self._wait_for_membership(run, crew)
                try:
                    outcome = self._run_generation(run, crew, formation)
                except WorkerFailedError as failure:
                    self._handle_failure(run, crew, failure)
                else:
                    if outcome == "done" or (outcome == "stopped" and self._stop_event.is_set()):
                        return outcome
                    if outcome == "lost":
                        crew.discard_state()
                run.lease.next_generation()
        finally:
            crew.close()

    def _start_worker_group(self, backend: ExecutionBackend) -> WorkerGroup:
        crew = backend.create_worker_group(self._config)
        try:
            crew.start()
        except ClusterError:
            crew.close()
            raise
        self._timestamps["actors"] = time.time()
        return crew

    def _wait_for_membership(self, run: _RunContext, workers: WorkerGroup) -> Membership:
        """The next generation. Who holds a step in memory goes on at once; for a checkpoint all are waited for."""
        while True:
            candidates = workers.list_candidates()
            formation = plan_membership(
                self._config, run.batching, candidates, self._target_workers, run.prepared.estimate_comm_bytes
            )
            complete = formation is not None and formation.layout.world_size == self._target_workers
            if formation is not None and (complete or formation.step is not None):
                return formation
            try:
                workers.wait_for_workers(len(candidates) + 1)
            except ClusterError as error:
                if formation is not None:  # others will not come; these can go on
                    return formation
                raise RunFailedError(f"gave up after {self._restarts} failures: {error}") from error

    def _run_generation(self, run: _RunContext, workers: WorkerGroup, membership: Membership) -> str:
        prepared, recorder, layout = run.prepared, run.recorder, membership.layout
        batching = self._balance_microbatches(run, membership, workers.list_candidates())
        infos = workers.set_members(membership.members)
        if self._initial_workers and membership.step is None:
            self._console.print_line("no state to go on from in memory; going on from the newest checkpoint")
        sites = [Site(info["rack"], info["node"]) for info in infos]
        if len(set(sites)) > 1:
            self._console.print_line(f"placed  {describe_placement(layout, sites)}")
        self._initial_workers = self._initial_workers or infos
        newest = None if membership.step is not None else find_newest_checkpoint(prepared.store, self._warn)
        first = membership.step if membership.step is not None else 0 if newest is None else newest.step
        self._write_workers(run, layout, infos)
        recorder.begin_generation(
            run.lease.generation, layout.world_size, get_device_info(self._config, infos[0]), first
        )
        if newest is not None:
            self._console.print_line(f"resumed from {newest.path}: step {first} of {self._config.train.steps}")
            recorder.totals.checkpoint_path = str(newest.path)
        elif membership.step is None and prepared.init_checkpoint is not None:
            self._console.print_line(f"first weights from {prepared.init_checkpoint}")
        self._console.start_progress(self._config.train.steps, first)
        spec = WorkerSpec(
            config=make_paths_absolute(self._config),
            layout=layout,
            batching=batching,
            model_spec=prepared.model_spec,
            custom=self._custom,
            generation=run.lease.generation,
            resume_step=None if newest is None else first,
            memory_step=membership.step,
            end_step=self._config.train.steps,
            pending_eval_metrics=self._find_unevaluated_metrics(run, first),
            has_pending_checkpoint=membership.step is not None and self._is_checkpoint_missing(run, first),
            init_checkpoint=prepared.init_checkpoint,
            replication_pairs=plan_replication_pairs(layout, sites) if self._config.checkpoint.buddies else (),
            is_single_node=len({site.node for site in sites}) == 1,
        )
        run.incidents.record_resumption(first, layout.world_size)

        regroup = self._build_regroup_poll(run, workers, membership, batching)
        return workers.run_generation(spec, partial(self._handle_record, run), self._stop_event, regroup)

    def _build_regroup_poll(
        self, run: _RunContext, workers: WorkerGroup, membership: Membership, batching: Batching
    ) -> Callable[[], RegroupRequest]:
        """Asks whether another formation is wanted: more workers have come, fewer are wished for, some are leaving.

        Where those that stay need not hold all of the state, this one is to be saved first.
        """
        looked: tuple[Any, ...] = ()

        def regroup() -> RegroupRequest:
            nonlocal looked
            candidates = workers.list_candidates()
            if looked == (
                seen := (self._target_workers, len(candidates), [(one.slowdown, one.is_draining) for one in candidates])
            ):
                return None
            looked = seen
            workers.scale_up_to(self._target_workers)
            other = plan_membership(
                self._config, run.batching, candidates, self._target_workers, run.prepared.estimate_comm_bytes
            )
            leaving = {one.worker for one in candidates if one.is_draining} & set(membership.members)
            if other is None:
                if leaving:
                    self._console.print_line("nodes are being taken away, and the others are too few to go on: saving")
                    self._stop_event.set()
                return None
            if leaving or other.layout.world_size < membership.layout.world_size:
                return "save" if max(compute_state_partition(membership.layout)) else "pause"
            larger = other.layout.world_size > membership.layout.world_size
            return "pause" if larger or self._balance_microbatches(run, membership, candidates) != batching else None

        return regroup

    def _balance_microbatches(self, run: _RunContext, membership: Membership, candidates: list[Candidate]) -> Batching:
        """The step's microbatches, fewer of them for those that are slow where the settings want that."""
        if self._config.fault.on_straggler != "rebalance":
            return run.batching
        pace = {one.worker: one.slowdown for one in candidates}
        return balance_by_speed(run.batching, membership.layout, [pace[member] for member in membership.members])

    def _find_unevaluated_metrics(self, run: _RunContext, step: int) -> dict[str, Any] | None:
        """The metrics of `step` where an evaluation follows it and was cut short."""
        train = self._config.train
        if not step or run.prepared.dataset.val is None or not should_evaluate(train, step, train.steps):
            return None
        if isinstance(self._custom, Script):  # what it evaluates is its own affair
            return None
        last = run.recorder.totals.last_metrics
        line = last if last.get("step") == step else run.prepared.directory.read_step_metrics(step)
        return None if line is None or "val/loss" in line else line

    def _is_checkpoint_missing(self, run: _RunContext, step: int) -> bool:
        """Whether a checkpoint of `step` is due and was cut short."""
        every = self._config.checkpoint.every
        due = step == self._config.train.steps or (step and every and step % every == 0)
        return bool(due) and step not in run.prepared.store.list_steps()

    def _handle_record(self, run: _RunContext, record: dict[str, Any]) -> None:
        before = run.recorder.committed_step
        if record["type"] == "incident":
            run.incidents.record_incident(record, run.lease.generation, before)
            self._console.print_line(f"{record['operation']}: {record['reason']}")
            return
        run.recorder.handle_record(record)
        if (
            run.recorder.committed_step > before
            and (incident := run.incidents.record_commit(record["metrics"]["time/unix"])) is not None
        ):
            self._console.print_line(
                f"recovered: rank {incident['rank']} {incident['kind']} at step {incident['step'] + 1}; "
                f"{incident['world']} -> {incident['world_after']} ranks; "
                f"{incident['steps_lost']} steps lost; {incident['recovered_s']:.1f} s"
            )

    def _handle_failure(self, run: _RunContext, workers: WorkerGroup, failure: WorkerFailedError) -> None:
        """A generation failed: record what it committed, and the failure. RunFailed where it is one too many."""
        whole = find_newest_complete_step(one.state_parts for one in workers.list_candidates())
        for metrics in workers.recall_metrics(run.recorder.committed_step, whole) if whole is not None else ():
            run.recorder.handle_record({"type": "step", "metrics": metrics})
        step = run.recorder.committed_step
        self._restarts += 1
        self._consecutive_failures = self._consecutive_failures + 1 if step <= self._furthest_step else 1
        self._furthest_step = max(step, self._furthest_step)
        run.incidents.record_failure(failure, run.lease.generation, step, run.recorder.world)
        if self._consecutive_failures > self._config.fault.max_failures:
            raise RunFailedError(
                f"gave up after {self._consecutive_failures} failures (fault.max_failures={self._config.fault.max_failures}): "
                f"{failure}"
            ) from failure
        self._console.print_line(f"worker failed: {failure}; {step} steps are committed")

    def _write_workers(self, run: _RunContext, layout: Layout, infos: list[dict[str, Any]]) -> None:
        keys = ("rank", "pid", "node", "host", "device")
        workers = [
            {key: info[key] for key in keys} | {"coordinates": layout.get_coordinates(info["rank"])} for info in infos
        ]
        run.prepared.directory.write_workers(run.lease.generation, workers)

    def _build_result(self, layout: Layout, recorder: RunRecorder, outcome: str) -> Result:
        tally, wall = recorder.totals, time.time() - self._timestamps["began"]
        return Result(
            outcome=outcome,
            train_loss=tally.last_metrics.get("train/loss"),
            val_loss=tally.val_loss,
            best_val_loss=tally.best_val_loss,
            steps=tally.last_metrics.get("step", 0),
            tokens=tally.last_metrics.get("train/tokens", 0),
            wall_s=wall,
            goodput=tally.productive_step_s / wall,
            restarts=self._restarts,
            layout=asdict(layout),
            checkpoint=tally.checkpoint_path,
            run_dir=self._config.run.dir,
            startup=self._compute_startup_times(recorder),
        )

    def _compute_startup_times(self, recorder: RunRecorder) -> dict[str, float]:
        """Seconds from the command to the first finished step, cut into its parts (slowest worker)."""
        if not recorder.ready_records or recorder.totals.first_step_unix is None:
            return {}
        began, cluster = self._timestamps["began"], self._timestamps["cluster"]
        imported = max(info["imported"] for info in self._initial_workers)
        spawned = max(info["began"] for info in self._initial_workers)
        built = max(record["model"] for record in recorder.ready_records.values())
        ends = {
            "cluster_s": cluster,
            "actors_s": spawned,
            "imports_s": imported,
            "model_s": built,
            "first_step_s": recorder.totals.first_step_unix,
        }
        parts, last = {}, began
        for name, end in ends.items():
            parts[name], last = max(0.0, end - last), max(last, end)
        return parts | {"total_s": recorder.totals.first_step_unix - began}


def get_device_info(config: Config, info: dict[str, Any]) -> DeviceInfo:
    """Peak FLOP/s of a worker's device by its name, where the settings give none, and its memory."""
    peak = config.observe.peak_tflops
    known = get_peak_tflops(info["device"], config.train.dtype) if peak == "auto" else float(peak)
    return DeviceInfo(known, info["memory_gib"])
