"""The records of a run: turns reports of workers into files, console lines and published checkpoints."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.driver_callbacks import DriverCallbackList
from raytrain_hpc.driver.pipeline_timelines import TimelineWriter
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import CheckpointError, LeaseLostError, RunDirectoryError
from raytrain_hpc.observability.console import Console, format_step_line
from raytrain_hpc.observability.metric_writers import JsonlWriter, TensorBoardWriter
from raytrain_hpc.observability.metrics import compute_mfu
from raytrain_hpc.observability.peak_flops import get_peak_tflops

Record = dict[str, Any]


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
    ):
        """Open the run's files and restore the totals of earlier starts.

        `on_published` is called with the step of each published checkpoint, and its seconds from the copy of the state.
        """
        self._config, self._directory, self._console = config, directory, console
        self._store, self._lease, self._checkpoint_metadata = store, lease, checkpoint_metadata
        self._flops_per_token = flops_per_token
        self._lock = threading.RLock()
        self._jsonl = JsonlWriter(directory.metrics, self._alarm)
        self._tensorboard: TensorBoardWriter | None = None
        self._callbacks, self._on_published = callbacks, on_published
        self._shards: dict[int, dict[int, ShardReport | str]] = {}
        self._labels: dict[int, list[str]] = {}  # of steps whose checkpoint is not published yet
        self._write_s: dict[int, float] = {}  # step -> seconds of its slowest rank
        self._timelines = TimelineWriter(directory.timeline)
        self._committed_step = 0
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
            self._generation, self._world, self._device = generation, world, device
            self._shards, self._write_s, self._committed_step = {}, {}, first_step
            self._awaits_first_step = self.totals.first_step_unix is None
            if self._awaits_first_step:
                self.ready_records = {}
            self._timelines.discard_incomplete()
            self.totals.productive_step_s -= sum(
                seconds for step, seconds in self.totals.unsaved_steps if step > first_step
            )
            self.totals.unsaved_steps = [
                (step, seconds) for step, seconds in self.totals.unsaved_steps if step <= first_step
            ]
            if self._tensorboard is not None:
                self._tensorboard.discard_steps_after(first_step)

    def handle_record(self, record: Record) -> None:
        """Handle one record from a worker, according to its type."""
        with self._lock:
            if record["type"] == "step":
                self._handle_step(record["metrics"])
            elif record["type"] == "shard":
                self._handle_shard(record)
            elif record["type"] == "label":
                self._handle_label(record)
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
        """Write what is pending and close all files."""
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
        totals.last_metrics = metrics
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
            self.totals.productive_step_s += metrics["time/step_s"]
            self.totals.unsaved_steps.append((self._committed_step, metrics["time/step_s"]))
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
        self._publish_complete_checkpoints()

    def _handle_timeline(self, record: Record) -> None:
        try:
            description = self._timelines.add_rank(record, self._world)
        except OSError as error:
            self._alarm(f"timeline of step {record['step']} not written: {error}; the run continues")
            return
        if description is not None:
            self._console.print_line(f"timeline {Path(self._config.run.dir) / 'timeline' / description}")

    def _handle_shard(self, record: Record) -> None:
        if record["generation"] != self._generation:
            return
        step, rank = record["step"], record["rank"]
        report = record["error"] if "error" in record else ShardReport.from_json(record["shard"])
        self._shards.setdefault(step, {})[rank] = report
        self._write_s[step] = max(self._write_s.get(step, 0.0), record.get("seconds", 0.0))
        self._publish_complete_checkpoints()

    def _handle_label(self, record: Record) -> None:
        """Label a checkpoint, at once if it is published. A repeated step labels it again."""
        step = record["step"]
        if step in self._store.list_steps() and step not in self._shards:
            self._apply_labels(step, record["labels"])
        else:
            self._labels.setdefault(step, []).extend(record["labels"])

    def _apply_labels(self, step: int, labels: Sequence[str]) -> None:
        try:
            self._store.set_labels(step, labels)
        except CheckpointError as error:
            self._alarm(f"{error}; the run continues")

    def _publish_complete_checkpoints(self) -> None:
        """Publish every checkpoint whose shards are all written and whose step is in metrics.jsonl."""
        for step in sorted(self._shards):
            reports = self._shards[step]
            if len(reports) < self._world or step > self._committed_step:
                continue
            del self._shards[step]
            write_s = self._write_s.pop(step)
            errors = {rank: report for rank, report in reports.items() if isinstance(report, str)}
            if errors:
                first_rank = min(errors)
                more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
                self._report_save_failure(step, f"rank {first_rank}{more}: {errors[first_rank]}")
                continue
            self._publish(step, [report for report in reports.values() if not isinstance(report, str)], write_s)

    def _publish(self, step: int, reports: list[ShardReport], write_s: float) -> None:
        start = time.perf_counter()
        try:
            self._jsonl.sync()
            path = self._store.publish(
                step, self._generation, reports, self._checkpoint_metadata(step), self._lease.check
            )
        except LeaseLostError:
            raise
        except (OSError, CheckpointError, RunDirectoryError) as error:  # a full disk must not end the run
            self._report_save_failure(step, str(error))
            return
        self.totals.checkpoint_path, self.totals.save_error = str(path), None
        self.totals.unsaved_steps = [(s, seconds) for s, seconds in self.totals.unsaved_steps if s > step]
        shown_path = Path(self._config.run.dir) / "checkpoints" / path.name  # with run.dir as the user wrote it
        publish_s = time.perf_counter() - start
        self._console.print_line(f"checkpoint {shown_path} ({1000 * publish_s:.0f} ms to publish)")
        self._on_published(step, write_s + publish_s)
        self._callbacks.call("on_checkpoint_published", step, path)
        self._apply_labels(step, self._labels.pop(step, ()))
        try:
            self._store.prune(self._config.checkpoint.keep)
        except CheckpointError as error:
            self._alarm(f"old checkpoints cannot be deleted: {error}; the run continues")

    def _report_save_failure(self, step: int, reason: str) -> None:
        self._store.discard(step, self._generation)
        self._alarm(f"checkpoint of step {step} not saved: {reason}; the run continues")
        self.totals.save_error = reason

    def _alarm(self, text: str) -> None:
        self._console.print_line(f"alarm: {text}")
