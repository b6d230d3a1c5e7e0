"""One run from its preparation to its result: generations of workers, each started from the newest checkpoint."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from functools import partial
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.config import Config
from raytrain_hpc.driver.fleet import Fleet, open_fleet
from raytrain_hpc.driver.incidents import IncidentLog
from raytrain_hpc.driver.preparation import PreparedRun, located, newest_checkpoint, prepare_run
from raytrain_hpc.driver.recorder import DeviceFacts, RunRecorder
from raytrain_hpc.driver.result import Result
from raytrain_hpc.errors import ClusterError, RunDirectoryError, RunFailed, WorkerFailed
from raytrain_hpc.observe.console import Console, short_count
from raytrain_hpc.observe.devices import peak_tflops
from raytrain_hpc.plan.flops import CAUSAL_CONVENTION, flops_per_token
from raytrain_hpc.plan.layout import Batching, Layout
from raytrain_hpc.plan.memory import parameters_of_rank, state_bytes
from raytrain_hpc.worker.schedule import evaluates
from raytrain_hpc.worker.spec import CustomModel, WorkerSpec


class Supervisor:
    """Carries a run through its generations. `stop` may be set from any thread or signal handler."""

    def __init__(self, config: Config, custom: CustomModel | None, console: Console, stop: threading.Event):
        self._config, self._custom, self._console, self._stop = config, custom, console, stop
        self._marks: dict[str, float] = {"began": time.time()}
        self._restarts = 0
        self._warned: set[str] = set()

    def run(self) -> Result:
        """Prepare, train, and write the result. Raises what a user should see."""
        prepared = prepare_run(self._config, self._custom, self._warn)
        with open_fleet(self._config) as fleet:
            self._marks["cluster"] = time.time()
            prepared.layout(fleet.world)  # the last thing that can be wrong with the settings: nothing is written yet
            lease = Lease.acquire(prepared.directory.path, owner=f"{self._config.run.name}")
            try:
                with lease.kept(self._stop.set):
                    return self._supervise(prepared, lease, fleet)
            finally:
                self._release(lease)

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
        self._incidents = IncidentLog(prepared.directory)
        self._announce(prepared, layout, batching)
        prepared.store.discard_staging()
        recorder = RunRecorder(
            self._config,
            prepared.directory,
            self._console,
            prepared.store,
            lease,
            prepared.meta(batching),
            None if self._custom else flops_per_token(prepared.shape, self._config.train.seq_len),
        )
        try:
            while True:
                try:
                    outcome = self._generation(prepared, lease, fleet, layout, batching, recorder)
                    break
                except WorkerFailed as failure:
                    self._record_failure(lease, failure, recorder)
                except ClusterError as error:
                    if self._restarts:
                        raise RunFailed(f"gave up after {self._restarts} failures: {error}") from error
                    raise
        finally:
            self._console.end()
            recorder.close()
        if outcome == "stopped" and recorder.tally.save_error:
            raise RunFailed(f"stopped without a checkpoint: {recorder.tally.save_error}")
        result = self._result(prepared, layout, recorder, outcome)
        prepared.directory.write_result(result.to_json())
        return result

    def _generation(
        self,
        prepared: PreparedRun,
        lease: Lease,
        fleet: Fleet,
        layout: Layout,
        batching: Batching,
        recorder: RunRecorder,
    ) -> str:
        newest = newest_checkpoint(prepared.store, self._warn)
        first = 0 if newest is None else newest.step
        unevaluated = self._unevaluated(prepared, first)
        if first >= self._config.train.steps and newest is not None and unevaluated is None:
            self._console.line(f"already trained: {newest.path} is at step {first} of {self._config.train.steps}")
            recorder.tally.checkpoint = str(newest.path)
            return "done"
        crew = fleet.crew()
        try:
            infos = crew.start()
            self._marks["actors"] = time.time()
            self._write_workers(prepared, lease, layout, infos)
            recorder.begin(lease.generation, layout.world, device_facts(self._config, infos[0]), first)
            if newest is not None:
                self._console.line(f"resumed from {newest.path}: step {first} of {self._config.train.steps}")
                recorder.tally.checkpoint = str(newest.path)
            self._console.begin(self._config.train.steps, first)
            spec = WorkerSpec(
                config=located(self._config),
                layout=layout,
                batching=batching,
                shape=prepared.shape,
                custom=self._custom,
                generation=lease.generation,
                resume_step=None if newest is None else first,
                steps_to=self._config.train.steps,
                unevaluated=unevaluated,
            )
            self._infos = infos
            self._incidents.resumed(first)
            return crew.run(spec, partial(self._handle, recorder), self._stop)
        finally:
            crew.close()

    def _unevaluated(self, prepared: PreparedRun, step: int) -> dict[str, Any] | None:
        """The metrics of `step` where an evaluation follows it and a stop cut that short."""
        train = self._config.train
        if prepared.dataset.val is None or not evaluates(train, step, train.steps):
            return None
        line = prepared.directory.metrics_of(step)
        return None if line is None or "val/loss" in line else line

    def _handle(self, recorder: RunRecorder, record: dict[str, Any]) -> None:
        before = recorder.step
        recorder.handle(record)
        if recorder.step > before and (incident := self._incidents.committed()) is not None:
            self._console.line(
                f"recovered: rank {incident['rank']} {incident['kind']} at step {incident['step'] + 1}; "
                f"{incident['steps_lost']} steps lost; {incident['recovered_s']:.1f} s"
            )

    def _record_failure(self, lease: Lease, failure: WorkerFailed, recorder: RunRecorder) -> None:
        self._restarts += 1
        self._incidents.failed(failure, lease.generation, recorder.step)
        if self._restarts > self._config.fault.max_failures:
            raise RunFailed(
                f"gave up after {self._restarts} failures (fault.max_failures={self._config.fault.max_failures}): "
                f"{failure}"
            ) from failure
        self._console.line(
            f"worker failed: {failure}; restarting from the newest checkpoint (step {recorder.step} reached)"
        )
        lease.next_generation()

    def _announce(self, prepared: PreparedRun, layout: Layout, batching: Batching) -> None:
        config, shape, train = self._config, prepared.shape, self._config.train
        own = parameters_of_rank(shape, layout, train.seq_len)
        state = (
            None if self._custom else state_bytes(own, layout, train.dtype, train.optimizer, config.parallel.offload)
        )
        plan = {
            "layout": asdict(layout),
            "workers": layout.world,
            "microbatches": asdict(batching),
            "state_bytes_per_rank": state,
            "flops_per_token": None if self._custom else flops_per_token(shape, train.seq_len),
            "flops_convention": CAUSAL_CONVENTION,
        }
        tokenizer = None if prepared.dataset.tokenizer is None else prepared.dataset.tokenizer.to_json()
        prepared.directory.write_start(config, plan, tokenizer)
        line = self._console.line
        line(f"run     {config.run.dir}  seed {config.run.seed}")
        if self._custom:
            line("model   given by the caller")
        else:
            line(
                f"model   {short_count(shape.num_parameters())} parameters: {shape.num_layers} layers, width "
                f"{shape.hidden_size}, {shape.num_heads} heads, vocabulary {shape.vocab_size}; {train.dtype}"
            )
        line(f"data    {_data_line(prepared)}")
        memory = "" if state is None else f"; {state / 2**30:.2f} GiB of state a worker"
        line(f"layout  {layout.describe()}; {batching.count} microbatches of {batching.size} x {train.seq_len}{memory}")
        line(
            f"mfu     counts {CAUSAL_CONVENTION}; against the device's dense bf16 peak "
            f"(observe.peak_tflops={config.observe.peak_tflops})"
        )

    def _write_workers(self, prepared: PreparedRun, lease: Lease, layout: Layout, infos: list[dict[str, Any]]) -> None:
        keys = ("rank", "pid", "node", "host", "device")
        workers = [
            {key: info[key] for key in keys} | {"coordinates": layout.coordinates(info["rank"])} for info in infos
        ]
        prepared.directory.write_workers(lease.generation, workers)

    def _result(self, prepared: PreparedRun, layout: Layout, recorder: RunRecorder, outcome: str) -> Result:
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


def _data_line(prepared: PreparedRun) -> str:
    data, dataset = prepared.config.data, prepared.dataset
    name = data.path if not data.sources else " + ".join(source.path for source in data.sources)
    kind = "random tokens" if dataset.tokenizer is None else f"{dataset.tokenizer.name} tokens"
    counts = f"{short_count(sum(s.num_tokens for s in dataset.train))} for training"
    val = "none" if dataset.val is None else short_count(dataset.val.num_tokens)
    return f"{name}: {kind}, {counts}, {val} for validation, vocabulary {dataset.vocab_size}; order {data.order}"


def device_facts(config: Config, info: dict[str, Any]) -> DeviceFacts:
    """Peak FLOP/s of a worker's device by its name, where the settings give none, and its memory."""
    peak = config.observe.peak_tflops
    known = peak_tflops(info["device"], config.train.dtype) if peak == "auto" else float(peak)
    return DeviceFacts(known, info["memory_gib"])
