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
from raytrain_hpc.driver.auto_layout import choose, machine_of
from raytrain_hpc.driver.backend import Crew, Fleet, Wish, open_fleet
from raytrain_hpc.driver.checkpoint_sampler import Sampler
from raytrain_hpc.driver.incident_log import IncidentLog
from raytrain_hpc.driver.result import Result
from raytrain_hpc.driver.run_banner import announce
from raytrain_hpc.driver.run_recorder import DeviceFacts, RunRecorder
from raytrain_hpc.driver.run_setup import PreparedRun, located, newest_checkpoint, prepare_run
from raytrain_hpc.elastic.load_balancing import by_pace
from raytrain_hpc.elastic.recovery import Candidate, Formation, form, least_workers
from raytrain_hpc.elastic.state_partition import buddies, newest_step, parts
from raytrain_hpc.errors import ClusterError, ConfigError, RunDirectoryError, RunFailed, WorkerFailed
from raytrain_hpc.observability.console import Console
from raytrain_hpc.observability.experiment_trackers import Behind, trackers_of
from raytrain_hpc.observability.peak_flops import peak_tflops
from raytrain_hpc.optim.lr_scheduler import evaluates
from raytrain_hpc.planner.flops import flops_per_token
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.planner.placement import Site, described
from raytrain_hpc.runtime.worker_spec import CustomModel, Script, WorkerSpec


@dataclass(frozen=True)
class _Run:
    """What all generations of a run share."""

    prepared: PreparedRun
    lease: Lease
    recorder: RunRecorder
    incidents: IncidentLog
    batching: Batching


class Supervisor:
    """Carries a run through its generations. `stop` may be set from any thread or signal handler."""

    def __init__(self, config: Config, custom: CustomModel | Script | None, console: Console, stop: threading.Event):
        self._config, self._custom, self._console, self._stop = config, custom, console, stop
        self._marks: dict[str, float] = {"began": time.time()}
        self._restarts = 0
        self._in_a_row, self._furthest = 0, -1  # failures, and the step that none of them was beyond
        self._infos: list[dict[str, Any]] = []  # of the first generation
        self._warned: set[str] = set()
        self._wanted = 0  # workers; 0: as many as the settings and the cluster say

    def resize(self, workers: int) -> None:
        """Go on with this many workers from the next step boundary on, or as soon as they are there. Any thread's.

        Raises ConfigError for fewer than the run may shrink to.
        """
        least = least_workers(self._config)
        if workers < least:
            raise ConfigError("workers", workers, "resize", f"cluster.min_workers allows no fewer than {least}")
        self._wanted = workers

    def run(self) -> Result:
        """Prepare, train, and write the result. Raises what a user should see."""
        prepared = prepare_run(self._config, self._custom, self._warn)
        with open_fleet(self._config) as fleet:
            self._marks["cluster"] = time.time()
            prepared = choose(prepared, fleet.world, fleet.cluster, self._console.line)
            self._config = prepared.config
            prepared.layout(fleet.world)  # the last thing that can be wrong with the settings: nothing is written yet
            lease = Lease.acquire(prepared.directory.path, owner=f"{self._config.run.name}")
            try:
                with lease.kept(self._stop.set):
                    return self._supervise(prepared, lease, fleet)
            finally:
                self._release(lease)

    def _trackers(self, fleet: Fleet) -> list[Behind]:
        found = trackers_of(self._config, self._alarm)
        if fleet.lasting and self._config.observe.ray_metrics:
            from raytrain_hpc.driver.ray_metrics import Gauges  # Ray is there, then

            found.append(Behind("ray_metrics", partial(Gauges, self._config.run.name), self._alarm))
        return found

    def _alarm(self, text: str) -> None:
        self._console.line(f"alarm: {text}")

    def _warn(self, text: str) -> None:
        """Print a line once: preparation and every generation look at the same checkpoints."""
        if text not in self._warned:
            self._warned.add(text)
            self._console.line(text)

    def _release(self, lease: Lease) -> None:
        try:
            lease.release()
        except RunDirectoryError as error:  # lost to another driver, or no space left: the run itself has ended
            self._console.line(f"alarm: {error}")

    def _supervise(self, prepared: PreparedRun, lease: Lease, fleet: Fleet) -> Result:
        layout, batching = prepared.layout(fleet.world)
        announce(prepared, layout, batching, machine_of(fleet.world, fleet.cluster), self._console.line)
        prepared.store.discard_staging()
        samples = Sampler(self._config, self._console.line, self._alarm)
        recorder = RunRecorder(
            self._config,
            prepared.directory,
            self._console,
            prepared.store,
            lease,
            prepared.meta(batching),
            None if self._custom else flops_per_token(prepared.shape, self._config.train.seq_len),
            self._trackers(fleet),
            samples.published,
        )
        run = _Run(prepared, lease, recorder, IncidentLog(prepared.directory), batching)
        self._wanted = self._wanted or fleet.world
        try:
            outcome = "done" if self._already_trained(run) else self._train(run, fleet)
        finally:
            self._console.end()
            recorder.close(failed=sys.exc_info()[0] is not None)
        if outcome == "stopped" and recorder.tally.save_error:
            raise RunFailed(f"stopped without a checkpoint: {recorder.tally.save_error}")
        result = self._result(layout, recorder, outcome)
        prepared.directory.write_result(result.to_json())
        samples.close()
        return result

    def _already_trained(self, run: _Run) -> bool:
        newest, steps = newest_checkpoint(run.prepared.store, self._warn), self._config.train.steps
        if newest is None or newest.step < steps or self._unevaluated(run, newest.step) is not None:
            return False
        self._console.line(f"already trained: {newest.path} is at step {newest.step} of {steps}")
        run.recorder.tally.checkpoint = str(newest.path)
        return True

    def _train(self, run: _Run, fleet: Fleet) -> str:
        """Generation after generation, until one has done what there was to do or was stopped."""
        crew = self._crew(fleet)
        try:
            while True:
                formation = self._formed(run, crew)
                try:
                    outcome = self._generation(run, crew, formation)
                except WorkerFailed as failure:
                    self._take_stock(run, crew, failure)
                else:
                    if outcome == "done" or (outcome == "stopped" and self._stop.is_set()):
                        return outcome
                    if outcome == "lost":
                        crew.forget()
                run.lease.next_generation()
        finally:
            crew.close()

    def _crew(self, fleet: Fleet) -> Crew:
        crew = fleet.crew(self._config)
        try:
            crew.start()
        except ClusterError:
            crew.close()
            raise
        self._marks["actors"] = time.time()
        return crew

    def _formed(self, run: _Run, crew: Crew) -> Formation:
        """The next generation. Who holds a step in memory goes on at once; for a checkpoint all are waited for."""
        while True:
            candidates = crew.candidates()
            formation = form(self._config, run.batching, candidates, self._wanted, run.prepared.sent)
            complete = formation is not None and formation.layout.world == self._wanted
            if formation is not None and (complete or formation.step is not None):
                return formation
            try:
                crew.wait(len(candidates) + 1)
            except ClusterError as error:
                if formation is not None:  # others will not come; these can go on
                    return formation
                raise RunFailed(f"gave up after {self._restarts} failures: {error}") from error

    def _generation(self, run: _Run, crew: Crew, formation: Formation) -> str:
        prepared, recorder, layout = run.prepared, run.recorder, formation.layout
        batching = self._shared_out(run, formation, crew.candidates())
        infos = crew.arrange(formation.members)
        if self._infos and formation.step is None:
            self._console.line("no state to go on from in memory; going on from the newest checkpoint")
        sites = [Site(info["rack"], info["node"]) for info in infos]
        if len(set(sites)) > 1:
            self._console.line(f"placed  {described(layout, sites)}")
        self._infos = self._infos or infos
        newest = None if formation.step is not None else newest_checkpoint(prepared.store, self._warn)
        first = formation.step if formation.step is not None else 0 if newest is None else newest.step
        self._write_workers(run, layout, infos)
        recorder.begin(run.lease.generation, layout.world, device_facts(self._config, infos[0]), first)
        if newest is not None:
            self._console.line(f"resumed from {newest.path}: step {first} of {self._config.train.steps}")
            recorder.tally.checkpoint = str(newest.path)
        elif formation.step is None and prepared.initial is not None:
            self._console.line(f"first weights from {prepared.initial}")
        self._console.begin(self._config.train.steps, first)
        spec = WorkerSpec(
            config=located(self._config),
            layout=layout,
            batching=batching,
            shape=prepared.shape,
            custom=self._custom,
            generation=run.lease.generation,
            resume_step=None if newest is None else first,
            memory_step=formation.step,
            steps_to=self._config.train.steps,
            unevaluated=self._unevaluated(run, first),
            unsaved=formation.step is not None and self._unsaved(run, first),
            initial=prepared.initial,
            buddies=buddies(layout, sites) if self._config.checkpoint.buddies else (),
            one_node=len({site.node for site in sites}) == 1,
        )
        run.incidents.resumed(first, layout.world)

        regroup = self._regrouping(run, crew, formation, batching)
        return crew.run(spec, partial(self._handle, run), self._stop, regroup)

    def _regrouping(self, run: _Run, crew: Crew, now: Formation, batching: Batching) -> Callable[[], Wish]:
        """Asks whether another formation is wanted: more workers have come, fewer are wished for, some are leaving.

        Where those that stay need not hold all of the state, this one is to be saved first.
        """
        looked: tuple[Any, ...] = ()

        def regroup() -> Wish:
            nonlocal looked
            candidates = crew.candidates()
            if looked == (seen := (self._wanted, len(candidates), [(one.pace, one.leaving) for one in candidates])):
                return None
            looked = seen
            crew.extend(self._wanted)
            other = form(self._config, run.batching, candidates, self._wanted, run.prepared.sent)
            leaving = {one.worker for one in candidates if one.leaving} & set(now.members)
            if other is None:
                if leaving:
                    self._console.line("nodes are being taken away, and the others are too few to go on: saving")
                    self._stop.set()
                return None
            if leaving or other.layout.world < now.layout.world:
                return "save" if max(parts(now.layout)) else "pause"
            larger = other.layout.world > now.layout.world
            return "pause" if larger or self._shared_out(run, now, candidates) != batching else None

        return regroup

    def _shared_out(self, run: _Run, formation: Formation, candidates: list[Candidate]) -> Batching:
        """The step's microbatches, fewer of them for those that are slow where the settings want that."""
        if self._config.fault.on_straggler != "rebalance":
            return run.batching
        pace = {one.worker: one.pace for one in candidates}
        return by_pace(run.batching, formation.layout, [pace[member] for member in formation.members])

    def _unevaluated(self, run: _Run, step: int) -> dict[str, Any] | None:
        """The metrics of `step` where an evaluation follows it and was cut short."""
        train = self._config.train
        if not step or run.prepared.dataset.val is None or not evaluates(train, step, train.steps):
            return None
        if isinstance(self._custom, Script):  # what it evaluates is its own affair
            return None
        last = run.recorder.tally.last
        line = last if last.get("step") == step else run.prepared.directory.metrics_of(step)
        return None if line is None or "val/loss" in line else line

    def _unsaved(self, run: _Run, step: int) -> bool:
        """Whether a checkpoint of `step` is due and was cut short."""
        every = self._config.checkpoint.every
        due = step == self._config.train.steps or (step and every and step % every == 0)
        return bool(due) and step not in run.prepared.store.steps()

    def _handle(self, run: _Run, record: dict[str, Any]) -> None:
        before = run.recorder.step
        if record["type"] == "incident":
            run.incidents.noted(record, run.lease.generation, before)
            self._console.line(f"{record['operation']}: {record['reason']}")
            return
        run.recorder.handle(record)
        if (
            run.recorder.step > before
            and (incident := run.incidents.committed(record["metrics"]["time/unix"])) is not None
        ):
            self._console.line(
                f"recovered: rank {incident['rank']} {incident['kind']} at step {incident['step'] + 1}; "
                f"{incident['world']} -> {incident['world_after']} ranks; "
                f"{incident['steps_lost']} steps lost; {incident['recovered_s']:.1f} s"
            )

    def _take_stock(self, run: _Run, crew: Crew, failure: WorkerFailed) -> None:
        """A generation failed: record what it committed, and the failure. RunFailed where it is one too many."""
        whole = newest_step(one.held for one in crew.candidates())
        for metrics in crew.recall(run.recorder.step, whole) if whole is not None else ():
            run.recorder.handle({"type": "step", "metrics": metrics})
        step = run.recorder.step
        self._restarts += 1
        self._in_a_row = self._in_a_row + 1 if step <= self._furthest else 1
        self._furthest = max(step, self._furthest)
        run.incidents.failed(failure, run.lease.generation, step, run.recorder.world)
        if self._in_a_row > self._config.fault.max_failures:
            raise RunFailed(
                f"gave up after {self._in_a_row} failures (fault.max_failures={self._config.fault.max_failures}): "
                f"{failure}"
            ) from failure
        self._console.line(f"worker failed: {failure}; {step} steps are committed")

    def _write_workers(self, run: _Run, layout: Layout, infos: list[dict[str, Any]]) -> None:
        keys = ("rank", "pid", "node", "host", "device")
        workers = [
            {key: info[key] for key in keys} | {"coordinates": layout.coordinates(info["rank"])} for info in infos
        ]
        run.prepared.directory.write_workers(run.lease.generation, workers)

    def _result(self, layout: Layout, recorder: RunRecorder, outcome: str) -> Result:
        tally, wall = recorder.tally, time.time() - self._marks["began"]
        return Result(
            outcome=outcome,
            train_loss=tally.last.get("train/loss"),
            val_loss=tally.val_loss,
            best_val_loss=tally.best_val_loss,
            steps=tally.last.get("step", 0),
            tokens=tally.last.get("train/tokens", 0),
            wall_s=wall,
            goodput=tally.step_s / wall,
            restarts=self._restarts,
            layout=asdict(layout),
            checkpoint=tally.checkpoint,
            run_dir=self._config.run.dir,
            startup=self._startup(recorder),
        )

    def _startup(self, recorder: RunRecorder) -> dict[str, float]:
        """Seconds from the command to the first finished step, cut into its parts (slowest worker)."""
        if not recorder.ready or recorder.tally.first_step_unix is None:
            return {}
        began, cluster = self._marks["began"], self._marks["cluster"]
        imported = max(info["imported"] for info in self._infos)
        spawned = max(info["began"] for info in self._infos)
        built = max(record["model"] for record in recorder.ready.values())
        ends = {
            "cluster_s": cluster,
            "actors_s": spawned,
            "imports_s": imported,
            "model_s": built,
            "first_step_s": recorder.tally.first_step_unix,
        }
        parts, last = {}, began
        for name, end in ends.items():
            parts[name], last = max(0.0, end - last), max(last, end)
        return parts | {"total_s": recorder.tally.first_step_unix - began}


def device_facts(config: Config, info: dict[str, Any]) -> DeviceFacts:
    """Peak FLOP/s of a worker's device by its name, where the settings give none, and its memory."""
    peak = config.observe.peak_tflops
    known = peak_tflops(info["device"], config.train.dtype) if peak == "auto" else float(peak)
    return DeviceFacts(known, info["memory_gib"])
