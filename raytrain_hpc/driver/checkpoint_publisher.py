"""Publication of checkpoints by the driver, in the background: a slow disk or store must not delay its other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.checkpoint.manifest import ShardReport
from raytrain_hpc.checkpoint.retention import select_kept_steps
from raytrain_hpc.errors import CheckpointError, LeaseLostError, RunDirectoryError
from raytrain_hpc.storage.location import Location


@dataclass(frozen=True)
class Publication:
    """A published checkpoint. `write_s`: from the copy of the state to its last file; `publish_s`: from then on."""

    step: int
    path: Location
    write_s: float
    publish_s: float


class PublicationTarget(Protocol):
    """A CheckpointStore, or the catalog of the checkpoints in node-local storage."""

    def publish(
        self,
        step: int,
        generation: int,
        reports: Sequence[ShardReport],
        meta: Mapping[str, Any],
        pre_publish: Callable[[], None],
    ) -> Location:
        """Publish the files of a step as a checkpoint, and return its directory."""

    def discard(self, step: int, generation: int) -> None:
        """Delete the files of a step that cannot be published."""

    def list_abandoned(self, generation: int) -> list[tuple[int, int]]:
        """Return step and generation of the unpublished files of generations before `generation`."""

    def list_steps(self) -> list[int]:
        """Return the steps of all checkpoints, ascending."""

    def set_labels(self, step: int, labels: Sequence[str]) -> None:
        """Move labels to the checkpoint of a step."""

    def prune(self, keep: int, fallback_steps: Collection[int] = ()) -> list[Location]:
        """Delete checkpoints older than the newest `keep` ones; 0: none. Return the deleted paths.

        For each of `fallback_steps`, the newest one that is not newer is kept too.
        """


@dataclass(frozen=True)
class _Cleaning:
    """Deletion of what ranks of generations before `generation` have written and will not publish."""

    generation: int


@dataclass
class _Job:
    step: int
    generation: int
    reports: Sequence[ShardReport]
    write_s: float
    verified_step: int
    is_superseded: bool = False


class CheckpointPublisher:
    """Collects the shard reports of ranks, and publishes a checkpoint when all ranks have written their shards.

    A thread publishes, labels and prunes, one checkpoint after the other. If storage is slower than the checkpoints
    come, those that would be pruned at once are not published. When nothing else is to be done, it deletes what earlier
    generations have left unfinished, without delaying anything. Not thread-safe, except for the callbacks, which it
    calls from its thread: `on_published(publication)`, `on_failed(step, reason)`, `alarm(line)`.
    """

    def __init__(
        self,
        store: PublicationTarget,
        lease: Lease,
        keep: int,
        make_metadata: Callable[[int], Mapping[str, Any]],
        sync_records: Callable[[], None],
        on_published: Callable[[Publication], None],
        on_failed: Callable[[int, str], None],
        alarm: Callable[[str], None],
        get_fallback_steps: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Initialize without a thread.

        Args:
            keep: The number of checkpoints that are kept; 0: all.
            make_metadata: Returns the metadata of the checkpoint of a step.
            sync_records: Makes the metrics of all committed steps durable. Called before each publication, so that no
                checkpoint is newer than they are. Raises OSError.
            get_fallback_steps: Returns the steps after which no state may be trusted when a fault is found: the newest
                checkpoint that is not newer is kept too.
        """
        self._store, self._lease, self._keep, self._get_fallback_steps = store, lease, keep, get_fallback_steps
        self._make_metadata, self._sync_records = make_metadata, sync_records
        self._on_published, self._on_failed, self._alarm = on_published, on_failed, alarm
        self._generation, self._world_size = 0, 0
        self._reports: dict[int, dict[int, ShardReport | str]] = {}  # step -> rank -> report or error
        self._write_s: dict[int, float] = {}  # step -> seconds of its slowest rank
        self._verified_steps: dict[int, int] = {}  # step -> the last one that audits had verified by then
        self._labels: dict[int, list[str]] = {}  # step -> labels that are not written yet
        self._jobs: SimpleQueue[_Job | _Cleaning | Callable[[], None] | None] = SimpleQueue()
        self._pending_steps: list[int] = []  # submitted, not finished
        self._waiting: list[_Job] = []  # submitted, not begun
        self._lock = threading.Lock()  # of the labels, and of what they depend on: reports and waiting jobs
        self._num_jobs = 0  # submitted, not finished, without cleaning
        self._abandoned: list[tuple[int, int]] = []  # step and generation of files that are to be deleted
        self._publishing_generation = 0  # the last one of which a checkpoint was published
        self._idle = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin_generation(self, generation: int, world_size: int) -> None:
        """Discard incomplete checkpoints of earlier generations. Those that are complete are still published.

        Their files are deleted later: it takes time, and recovery does not need the space.
        """
        if self._generation:  # the driver has removed what earlier drivers left
            self._clean(generation)
        self._generation, self._world_size = generation, world_size
        self._reports, self._write_s, self._verified_steps = {}, {}, {}

    def add_report(self, record: Mapping[str, Any]) -> None:
        """Add the report of one rank; that of an earlier generation is ignored."""
        if record["generation"] != self._generation:
            return
        step = record["step"]
        report = record["error"] if "error" in record else ShardReport.from_json(record["shard"])
        self._reports.setdefault(step, {})[record["rank"]] = report
        self._write_s[step] = max(self._write_s.get(step, 0.0), record.get("seconds", 0.0))
        self._verified_steps[step] = record.get("verified_step", 0)

    def add_labels(self, step: int, labels: Sequence[str]) -> None:
        """Label the checkpoint of `step`: when it is published, or at once if it is. A repeated step does so again."""
        with self._lock:
            self._labels.setdefault(step, []).extend(labels)
            for job in self._waiting:
                job.is_superseded = job.is_superseded and job.step != step
        self._submit(self._apply_labels)  # after its publication, if that is under way

    def publish_complete(self, committed_step: int) -> None:
        """Start to publish every checkpoint up to `committed_step` that all ranks have written.

        Raises as `raise_error` does.
        """
        self.raise_error()
        for step in sorted(self._reports):
            if len(self._reports[step]) == self._world_size and step <= committed_step:
                with self._lock:
                    job = self._take_reports(step)
                self._submit(job)

    def _take_reports(self, step: int) -> _Job | Callable[[], None]:
        """Return what is to be done with the files of a step that all ranks have reported. Call under the lock."""
        reports, write_s = self._reports.pop(step), self._write_s.pop(step)
        verified_step = self._verified_steps.pop(step)
        errors = {rank: report for rank, report in reports.items() if isinstance(report, str)}
        if errors:
            first_rank = min(errors)
            more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            return self._make_discard(step, f"rank {first_rank}{more}: {errors[first_rank]}")
        shards = [report for report in reports.values() if not isinstance(report, str)]
        self._pending_steps.append(step)
        job = _Job(step, self._generation, shards, write_s, verified_step)
        self._waiting.append(job)
        self._supersede()
        return job

    def _supersede(self) -> None:
        """Mark the waiting checkpoints that would be deleted as soon as they are published. Call under the lock."""
        if self._keep:
            kept = select_kept_steps((job.step for job in self._waiting), self._keep, self._get_fallback_steps())
            for job in self._waiting:
                job.is_superseded = job.step not in kept and job.step not in self._labels

    def raise_error(self) -> None:
        """Raise LeaseLostError if a publication found that another driver has taken over, or its unexpected error."""
        if self._error is not None:
            raise self._error

    def is_pending(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is being published."""
        return step in self._pending_steps

    def wait(self) -> None:
        """Wait until nothing is left to publish. Raises as `raise_error` does."""
        with self._idle:
            self._idle.wait_for(lambda: not self._num_jobs)
        self.raise_error()

    def close(self) -> None:
        """Wait until nothing is left to publish, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _submit(self, job: _Job | Callable[[], None]) -> None:
        with self._idle:
            self._num_jobs += 1
        self._put(job)

    def _clean(self, generation: int) -> None:
        """Delete the unfinished files of generations before `generation`, after the publications that were submitted.

        Their ranks cannot publish: a file that one still writes is deleted with its directory, or when the new
        generation has published its first checkpoint.
        """
        self._put(_Cleaning(generation))

    def _put(self, job: _Job | _Cleaning | Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint-publisher", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_job(job)
            while self._abandoned and self._jobs.empty():
                self._store.discard(*self._abandoned.pop())

    def _run_job(self, job: _Job | _Cleaning | Callable[[], None]) -> None:
        try:
            if isinstance(job, _Cleaning):
                self._abandoned = list({*self._abandoned, *self._store.list_abandoned(job.generation)})
            else:
                self._publish(job) if isinstance(job, _Job) else job()
        except CheckpointError as error:
            self._alarm(f"{error}; the run continues")
        except Exception as error:  # a lost lease, or a defect: `raise_error` raises it in the driver's thread
            self._error = self._error or error
        finally:
            with self._idle:
                self._num_jobs -= not isinstance(job, _Cleaning)
                if isinstance(job, _Job):
                    self._pending_steps.remove(job.step)
                self._idle.notify_all()

    def _publish(self, job: _Job) -> None:
        with self._lock:
            self._waiting.remove(job)
        if job.is_superseded:
            self._store.discard(job.step, job.generation)
            return
        start = time.perf_counter()
        try:
            self._lease.check()  # records of a driver that was replaced cannot be written either
            self._sync_records()
            metadata = {**self._make_metadata(job.step), "verified_step": job.verified_step}
            path = self._store.publish(job.step, job.generation, job.reports, metadata, self._lease.check)
        except LeaseLostError:
            raise
        except (OSError, CheckpointError, RunDirectoryError) as error:  # a full disk must not end the run
            self._discard(job.step, job.generation, str(error))
            return
        self._on_published(Publication(job.step, path, job.write_s, time.perf_counter() - start))
        self._apply_labels()  # of older checkpoints too: one may have come since, and must be written before they go
        if job.generation > self._publishing_generation:
            self._publishing_generation = job.generation
            self._clean(job.generation)
        try:
            self._store.prune(self._keep, self._get_fallback_steps())
        except CheckpointError as error:
            self._alarm(f"old checkpoints cannot be deleted: {error}; the run continues")

    def _make_discard(self, step: int, reason: str) -> Callable[[], None]:
        generation = self._generation
        return lambda: self._discard(step, generation, reason)

    def _discard(self, step: int, generation: int, reason: str) -> None:
        self._store.discard(step, generation)
        self._on_failed(step, reason)

    def _apply_labels(self) -> None:
        """Write the labels of published checkpoints. Those of others wait. Raises CheckpointError if storage fails."""
        with self._lock:
            unpublished = self._reports.keys() | {job.step for job in self._waiting}
            labels = {step: tuple(names) for step, names in self._labels.items() if step not in unpublished}
        published = set(self._store.list_steps()) if labels else ()
        for step, names in labels.items():
            if step in published:
                self._store.set_labels(step, names)
                with self._lock:  # more may have come meanwhile
                    self._labels[step] = self._labels[step][len(names) :]
                    if not self._labels[step]:
                        del self._labels[step]
