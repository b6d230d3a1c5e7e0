"""The records of a run: turns reports of workers into files, console lines and published checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.local_catalog import LocalCatalog
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.checkpoint_publisher import CheckpointPublisher, Publication
from raytrain_hpc.driver.driver_callbacks import DriverCallbackList
from raytrain_hpc.driver.pipeline_timelines import TimelineWriter
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.observability.console import Console, format_step_line
from raytrain_hpc.observability.metric_writers import JsonlWriter, TensorBoardWriter
from raytrain_hpc.observability.metrics import compute_mfu
from raytrain_hpc.observability.peak_flops import get_peak_tflops

Record = dict[str, Any]
_MAX_UNSAVED_STEPS = 10_000


@dataclass(frozen=True)
class DeviceInfo:
    """Peak TFLOP/s and memory of a device, for MFU and the share of memory in use. None if unknown."""

    peak_tflops: float | None
    memory_gib: float | None


def get_device_info(config: Config, rank_info: Mapping[str, Any]) -> DeviceInfo:
    """Return the peak TFLOP/s, as set or looked up by device name, and the memory of a rank's device."""
    peak = config.logging.peak_tflops
    peak_tflops = get_peak_tflops(rank_info["device"], config.train.dtype) if peak == "auto" else float(peak)
    return DeviceInfo(peak_tflops, rank_info["memory_gib"])


@dataclass
class RunTotals:
    """Totals over the run, for its result."""

    last_metrics: dict[str, Any] = field(default_factory=dict)
    val_loss: float | None = None
    best_val_loss: float | None = None
    productive_step_s: float = 0.0  # of steps that this driver committed; a repeated step counts once
    unsaved_steps: list[tuple[int, float]] = field(default_factory=list)  # (step, seconds) after the newest checkpoint
    first_step_unix: float | None = None
    checkpoint_path: str | None = None
    save_error: str | None = None

    def add_step(self, step: int, seconds: float) -> None:
        """Count a committed step, and remember it until it is saved.

        Without checkpoints, older steps are remembered together, as the first of them: they are lost together, since
        what memory holds is newer.
        """
        self.productive_step_s += seconds
        self.unsaved_steps.append((step, seconds))
        if len(self.unsaved_steps) > _MAX_UNSAVED_STEPS:
            older, newer = self.unsaved_steps[: _MAX_UNSAVED_STEPS // 2], self.unsaved_steps[_MAX_UNSAVED_STEPS // 2 :]
            self.unsaved_steps = [(older[0][0], sum(duration for _, duration in older)), *newer]

    def undo_steps_after(self, step: int) -> None:
        """Take back the steps after `step`, which are lost."""
        self.productive_step_s -= sum(seconds for lost, seconds in self.unsaved_steps if lost > step)
        self.unsaved_steps = [(kept, seconds) for kept, seconds in self.unsaved_steps if kept <= step]


class RunRecorder:
    """Handler of the records of all ranks. Thread-safe: a local worker's checkpoint thread reports during training."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        console: Console,
        store: CheckpointStore,
        lease: Lease,
        checkpoint_metadata: Callable[[int], dict[str, Any]],
        flops_per_token: float | None,
        callbacks: DriverCallbackList,
        on_published: Callable[[int, float], None] = lambda step, seconds: None,
        local_catalog: LocalCatalog | None = None,
    ):
        """Open the run's files and restore the totals of earlier starts.

        `on_published` is called with the step of each checkpoint published in the run directory, and its seconds from
        the copy of the state, from any thread. `local_catalog`: of checkpoints in node-local storage; None: none.
        """
        self._config, self._directory, self._console = config, directory, console
        self._flops_per_token = flops_per_token
        self._lock = threading.RLock()
        self._jsonl = JsonlWriter(directory.metrics, self._alarm)
        self._tensorboard: TensorBoardWriter | None = None
        self._callbacks, self._on_published = callbacks, on_published
        has_audits = bool(config.fault.audit_interval)
        self._publisher = CheckpointPublisher(
            store,
            lease,
            config.checkpoint.keep,
            checkpoint_metadata,
            self._sync,
            self._handle_published,
            self._handle_save_failure,
            self._alarm,
            lambda: (self.verified_step, self.audited_step) if has_audits else (),
        )
        self._publishers: dict[str, CheckpointPublisher] = {"run": self._publisher}  # tier -> publisher
        if local_catalog is not None:
            self._publishers["local"] = CheckpointPublisher(
                local_catalog,
                lease,
                config.checkpoint.local_keep,
                checkpoint_metadata,
                self._sync,
                lambda publication: None,
                partial(self._alarm_unsaved, "local checkpoint"),
                self._alarm,
                lambda: (self.verified_step,) if has_audits else (),  # which the nodes know too
            )
        # Known without asking storage, which may not answer when a generation has to start:
        self._published_steps, self.newest_checkpoint_time = set(store.list_steps()), store.get_newest_time()
        self._timelines = TimelineWriter(directory.timeline)
        self._committed_step = 0
        self.audited_step = 0  # the last step that was audited: no memory had changed by then
        self.verified_step = 0  # the last one that was audited by another rank: what was trained by then is right
        self._unprinted_steps: list[dict[str, Any]] = []  # metrics of the steps since the last log line
        self.totals = RunTotals()
        self.ready_records: dict[int, Record] = {}  # by rank, of the generation that commits the first step
        self._restore_totals()

    def begin_generation(self, generation: int, world: int, device: DeviceInfo, first_step: int) -> None:
        """Record a new generation of `world` ranks, and discard incomplete checkpoints and timelines of earlier ones.

        Call before the generation runs. `first_step`: steps that are committed when it starts.
        """
        self._callbacks.call("on_membership_changed", world, generation)
        with self._lock:
            self._world, self._device, self._committed_step = world, device, first_step
            self.audited_step = min(self.audited_step, first_step)
            self.verified_step = min(self.verified_step, first_step)
            for publisher in self._publishers.values():
                publisher.begin_generation(generation, world)
            self._awaits_first_step = self.totals.first_step_unix is None
            if self._awaits_first_step:
                self.ready_records = {}
            self._timelines.discard_incomplete()
            self.totals.undo_steps_after(first_step)
            if self._tensorboard is not None:
                self._tensorboard.discard_steps_after(first_step)

    def handle_record(self, record: Record) -> None:
        """Handle one record from a worker, according to its type."""
        with self._lock:
            if record["type"] == "step":
                self._handle_step(record["metrics"])
            elif record["type"] == "shard":
                publisher = self._publishers[record["tier"]]
                publisher.add_report(record)
                publisher.publish_complete(self._committed_step)
            elif record["type"] == "label":
                self._publisher.add_labels(record["step"], record["labels"])
            elif record["type"] == "ready" and self._awaits_first_step:
                self.ready_records[record["rank"]] = record
            elif record["type"] == "timeline":
                self._handle_timeline(record)
            elif record["type"] == "note":
                self._console.print_line(record["text"])

    @property
    def committed_step(self) -> int:
        """The last committed step of this generation, or the step from which it started."""
        return self._committed_step

    @property
    def world_size(self) -> int:
        """The number of ranks in this generation."""
        return self._world

    def close(self) -> None:
        """Publish complete checkpoints, write what is pending and close all files."""
        for publisher in self._publishers.values():
            publisher.close()
        with self._lock:
            self._jsonl.close()
            if self._tensorboard is not None:
                self._tensorboard.close()

    def _restore_totals(self) -> None:
        """Restore the totals from the metrics of earlier starts of this run."""
        for metrics in self._directory.read_metrics():
            self._update_totals(metrics)

    def _update_totals(self, metrics: dict[str, Any]) -> None:
        totals = self.totals
        totals.last_metrics, step = metrics, metrics["step"]
        self.audited_step = step if "elastic/audited" in metrics else min(self.audited_step, step - 1)
        self.verified_step = step if metrics.get("elastic/audited") else min(self.verified_step, step - 1)
        if "val/loss" in metrics:
            totals.val_loss = metrics["val/loss"]
            best = totals.best_val_loss
            totals.best_val_loss = totals.val_loss if best is None else min(best, metrics["val/loss"])

    def _handle_step(self, metrics: dict[str, Any]) -> None:
        if metrics["step"] > self._committed_step:
            rate, peak = metrics["throughput/tokens_per_sec"], self._device.peak_tflops
            metrics["throughput/mfu"] = (
                compute_mfu(rate, self._flops_per_token, self._world, peak) if self._flops_per_token else None
            )
            self._committed_step = metrics["step"]
            self._unprinted_steps.append(metrics)
            self.totals.add_step(self._committed_step, metrics["time/step_s"])
            if self.totals.first_step_unix is None:
                self.totals.first_step_unix = metrics["time/unix"]
        self._update_totals(metrics)  # also for a committed step that is reported again with its evaluation
        self._jsonl.write(metrics)
        if self._config.logging.tensorboard:
            if self._tensorboard is None:  # imported late: workers would wait for it
                self._tensorboard = TensorBoardWriter(self._directory.tensorboard, metrics["step"] - 1, self._alarm)
            self._tensorboard.write(metrics)
        self._callbacks.call("on_metrics", metrics)
        self._console.advance(self._committed_step)
        steps = self._config.train.steps
        if (
            self._committed_step % self._config.logging.interval == 0
            or self._committed_step in (1, steps)
            or "val/loss" in metrics
        ):
            line = format_step_line(metrics, self._unprinted_steps, steps, self._device.memory_gib)
            self._console.print_line(line)
            self._unprinted_steps = []
        for publisher in self._publishers.values():
            publisher.publish_complete(self._committed_step)

    def _handle_timeline(self, record: Record) -> None:
        try:
            description = self._timelines.add_rank(record, self._world)
        except OSError as error:
            self._alarm(f"timeline of step {record['step']} not written: {error}; the run continues")
            return
        if description is not None:
            self._console.print_line(f"timeline {self._config.run.dir}/timeline/{description}")

    def has_checkpoint(self, step: int) -> bool:
        """Return whether a checkpoint of `step` was published, or is written by all ranks and being published."""
        return step in self._published_steps or self._publisher.is_pending(step)

    def wait_for_checkpoints(self) -> None:
        """Wait until all complete checkpoints are published. Call before the newest one is looked for.

        Raises LeaseLostError if another driver has taken over.
        """
        for publisher in self._publishers.values():
            publisher.wait()

    def raise_error(self) -> None:
        """Raise LeaseLostError if another driver has taken over."""
        for publisher in self._publishers.values():
            publisher.raise_error()

    def _sync(self) -> None:
        """Make the metrics of all steps so far durable. Raises OSError."""
        self._jsonl.sync()  # without the lock: records that wait for a slow disk would make ranks look silent
        self._directory.upload()

    def _handle_published(self, publication: Publication) -> None:
        step = publication.step
        with self._lock:
            self.totals.checkpoint_path, self.totals.save_error = str(publication.path), None
            self.totals.unsaved_steps = [(s, seconds) for s, seconds in self.totals.unsaved_steps if s > step]
            self._published_steps.add(step)
            self.newest_checkpoint_time = time.time()
            # With run.dir as the user wrote it:
            shown_path = f"{self._config.run.dir}/checkpoints/{publication.path.name}"
            self._console.print_line(f"checkpoint {shown_path} ({1000 * publication.publish_s:.0f} ms to publish)")
            self._on_published(step, publication.write_s + publication.publish_s)
            self._callbacks.call("on_checkpoint_published", step, publication.path)

    def _handle_save_failure(self, step: int, reason: str) -> None:
        with self._lock:
            self._alarm_unsaved("checkpoint", step, reason)
            self.totals.save_error = reason

    def _alarm_unsaved(self, kind: str, step: int, reason: str) -> None:
        self._alarm(f"{kind} of step {step} not saved: {reason}; the run continues")

    def _alarm(self, text: str) -> None:
        self._console.print_line(f"alarm: {text}")
