"""Restarts and incidents of a run, with workers that fail on command. Without Ray."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.cli.main import main
from raytrain_hpc.driver import supervisor
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, WorkerFailedError
from raytrain_hpc.planner.topology import Node, Topology
from raytrain_hpc.runtime.phase_durations import PhaseDurations
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.state.sharded_state import StateShard, get_dtype_name
from tests.warm_pool import SMALL_OVERRIDES


def make_metrics(step: int, generation: int) -> dict[str, Any]:
    zero = ("lr", "grad_norm", "loss", "tokens")
    return {
        **{f"train/{name}": 0.0 for name in zero},
        "throughput/tokens_per_sec": 1.0,
        "throughput/tokens_per_sec_per_device": 1.0,
        "memory/peak_gib": 0.0,
        "time/unix": time.time(),
        "time/step_s": 0.001,
        "time/data_s": 0.0,
        "elastic/world_size": 1,
        "elastic/generation": generation,
        "step": step,
    }


class SavedSteps(int):
    """A number of steps after which a generation saves a checkpoint and ends to regroup, instead of failing."""


def write_checkpoint(spec: Any, step: int) -> dict[str, Any]:
    """Write the shard of a one-tensor state as rank 0 does, and return its record."""
    tensor = torch.full((2,), float(step))
    state = StateShard("model.w", (2,), get_dtype_name(tensor.dtype), Box.from_shape((2,)), tensor)
    staging = CheckpointStore(Path(spec.config.run.dir) / "checkpoints").create_staging(step, spec.generation)
    report = write_shard(staging / get_shard_name(0), [state])
    header = {"type": "shard", "tier": "run", "rank": 0, "generation": spec.generation, "step": step}
    return {**header, "shard": report.to_json()}


class FakeWorkerGroup:
    """Workers that follow a plan.

    Each generation commits the planned number of steps and fails, or saves (SavedSteps); None: it trains to the end. An
    exception instead of a number: no workers start. `held_steps`: the steps that the surviving worker then holds in
    memory.
    """

    def __init__(self, plan: list[int | Exception | None], held_steps: tuple[int, ...]):
        self.plan, self.held_steps, self.closed = plan, held_steps, False
        self.is_lost = self.is_absent = False  # its state is held by the node only; no replacement has started yet
        self.specs: list[Any] = []
        self.stops_at_failure = False  # a stop is requested when a generation fails
        self.kind = "died"  # of failures

    @property
    def _next(self) -> int | Exception | None:
        return self.plan[min(len(self.specs), len(self.plan) - 1)]

    def start(self) -> None:
        self.wait_for_workers(1)

    def wait_for_workers(self, count: int, timeout_s: float | None = None) -> None:
        if isinstance(self._next, Exception):
            raise self._next
        self.is_absent = False

    def get_capacity(self) -> None:
        """Return None: no cluster is followed."""

    def get_allowance(self) -> Allowance:
        return UNLIMITED

    def scale_up_to(self, count: int, wanted: int | None = None) -> None:
        assert count == 1, "no more workers were requested"

    def list_candidates(self) -> list[Candidate]:
        if isinstance(self._next, Exception) or self.is_absent:
            return []
        parts = self.list_parts()
        return [Candidate(0, "n", 7, () if self.is_lost else parts, node_parts=parts if self.is_lost else ())]

    def list_parts(self) -> tuple[StatePart, ...]:
        return tuple(StatePart(1, 0, 1, step) for step in self.held_steps) if self.specs else ()

    def list_held_parts(self) -> tuple[StatePart, ...]:
        return self.list_parts() if self.is_lost else ()

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        facts = {"rank": 0, "rack": "", "node": "n", "node_id": "n1", "host": "h", "pid": 7, "device": "cpu"}
        facts |= {"memory_gib": None, "cpu": "c", "versions": {}}
        return [facts | {"began": time.time(), "imported": time.time()}]

    def run_generation(
        self,
        spec: Any,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], Any],
    ) -> str:
        assert poll_regroup() is None
        num_steps = self._next
        on_record(PhaseDurations().to_ready_record(0) | {"unix": time.time() + 100.0 * len(self.specs)})
        self.specs.append(spec)
        steps = spec.end_step if num_steps is None else spec.start_step + num_steps
        for step in range(spec.start_step + 1, steps + 1):
            on_record({"type": "step", "metrics": make_metrics(step, spec.generation)})
        if num_steps is None:
            return "done"
        if isinstance(num_steps, SavedSteps):
            on_record(write_checkpoint(spec, steps))
            return "stopped"
        if self.stops_at_failure:
            stop_event.set()
        self.is_absent = self.is_lost
        now = time.time()
        raise WorkerFailedError(0, "n", 7, self.kind, "the reason", detected_at=now, last_seen=now - 0.25)

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """Return metrics of steps that were committed but not fetched."""
        return [make_metrics(step, 1) for step in range(after_step + 1, until_step + 1)]

    def discard_state(self) -> None:
        self.held_steps = ()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, FakeWorkerGroup]]:
    """Run the command with a worker group that follows a plan; the last entry of the plan repeats."""

    def start(
        plan: list[int | Exception | None],
        *words: str,
        held_steps: tuple[int, ...] = (),
        stops: bool = False,
        kind: str = "died",
        is_lost: bool = False,
    ) -> tuple[int, FakeWorkerGroup]:
        workers = FakeWorkerGroup(plan, held_steps)
        workers.stops_at_failure, workers.kind, workers.is_lost = stops, kind, is_lost

        class FakeBackend:
            world_size, cluster = 1, Topology((Node("local", "127.0.0.1", 1),), "cpu")
            follows_cluster = uses_existing_cluster = False

            def create_worker_group(self, config: Any) -> FakeWorkerGroup:
                return workers

        @contextmanager
        def open_fake_backend(config: Any, *arguments: Any) -> Any:
            yield FakeBackend()

        monkeypatch.setattr(supervisor, "open_backend", open_fake_backend)
        with pytest.raises(SystemExit) as exit_info:
            main(["train", *SMALL_OVERRIDES, f"run.dir={tmp_path}", *words])
        assert workers.closed
        return exit_info.value.code or 0, workers

    return start


def read_incidents(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "incidents.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("limit", [0, 2])
def test_run_gives_up_after_repeated_failures(run, tmp_path, capsys, limit: int) -> None:
    code, workers = run([3], f"fault.max_failures={limit}")
    assert (code, len(workers.specs), len(read_incidents(tmp_path))) == (4, limit + 1, limit + 1)
    (error,) = capsys.readouterr().err.splitlines()
    gave_up = f"gave up after {limit + 1} failures (fault.max_failures={limit})"
    assert error == f"error: {gave_up}: rank 0 (node n, pid 7) died: the reason"
    assert not (tmp_path / "result.json").exists()


def test_incidents_record_the_cost_of_recovery(run, tmp_path, capsys) -> None:
    code, _ = run([3, 0, None], "logging.verbose=true")
    assert code == 0
    first, second = read_incidents(tmp_path)
    keys = ("kind", "rank", "node", "pid", "operation", "generation", "step", "steps_lost")
    assert [first[key] for key in keys] == ["died", 0, "n", 7, "training step 4", 1, 3, 3]
    assert [second[key] for key in keys] == ["died", 0, "n", 7, "training step 1", 2, 0, 0]
    assert first["detected_s"] == second["detected_s"] == pytest.approx(0.25, abs=1e-3)
    assert first["recovered_s"] is None, "the second failure came before any step"
    assert 0 < second["recovered_s"] < 5
    assert sum(second["phases"].values()) == pytest.approx(second["recovered_s"] + 0.25, abs=1e-3)
    assert list(first["phases"]) == ["detect", "abort", "fence"], "all that was known of the first"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["restarts"] == 2
    parts = result["startup"]
    assert 2 * parts["total_s"] == pytest.approx(sum(parts.values())), "of the first generation only"
    assert result["goodput"] * result["wall_s"] == pytest.approx(result["steps"] * 0.001), "repeated steps count once"
    output = capsys.readouterr().out
    assert "worker failed: rank 0 (node n, pid 7) died: the reason; 3 steps are committed" in output
    (recovered,) = [line for line in output.splitlines() if "recovered" in line]
    phases = r"detect 0\.25, abort 0\.00, fence \d\.\d\d, .*, first step .*"
    pattern = rf"rank 0 died at step 1; recovered in \d\.\d\d s \({phases}\) on 1 of 1 workers, 0 steps lost"
    assert re.fullmatch(pattern, recovered)


@pytest.mark.parametrize("is_lost", [False, True], ids=["survivor", "held by the node"])
def test_resuming_from_memory(run, tmp_path, is_lost: bool) -> None:
    """Record steps that were committed but not fetched, and catch up on their evaluation and checkpoint."""
    words = ("fault.max_failures=1", "train.steps=9", "eval.interval=5", "checkpoint.interval=5")
    code, workers = run([3, None], *words, held_steps=(4, 5), is_lost=is_lost)
    assert code == 0
    (incident,) = read_incidents(tmp_path)
    assert (incident["step"], incident["steps_lost"], incident["world"], incident["world_after"]) == (5, 0, 1, 1)
    later = workers.specs[1]
    assert (later.memory_step, later.resume_step, later.start_step, later.has_pending_checkpoint) == (5, None, 5, True)
    assert later.pending_eval_metrics["step"] == 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))


@pytest.mark.parametrize(("held_steps", "memory_step"), [((4, 5), None), ((6, 7), 7)])
def test_resuming_after_a_save_to_regroup(run, held_steps: tuple[int, ...], memory_step: int | None) -> None:
    """With checkpoint.snapshot_interval above 1, memory can be older than the checkpoint: no saved step is repeated."""
    code, workers = run([SavedSteps(7), None], "train.steps=9", held_steps=held_steps)
    assert code == 0
    later = workers.specs[1]
    assert (later.start_step, later.memory_step) == (7, memory_step)
    assert later.resume_step == (7 if memory_step is None else None)


def test_only_failures_without_progress_count(run, tmp_path) -> None:
    code, workers = run([3, 2, 1, 0, 0, 1, None], "fault.max_failures=2", "train.steps=9", held_steps=())
    assert code == 4, "without state in memory each generation starts over, and the first one got furthest"
    assert len(read_incidents(tmp_path)) == 3


def test_preemptions_do_not_count_as_failures(run, tmp_path, capsys) -> None:
    code, _ = run([3, 0, 0, 0, None], "fault.max_failures=0", "train.steps=9", kind="preempted")
    assert code == 0 and [incident["kind"] for incident in read_incidents(tmp_path)] == ["preempted"] * 4


def test_preemptions_have_a_limit_of_their_own(run, tmp_path, capsys) -> None:
    code, _ = run([3, 0, 0, 0, None], "fault.max_preemptions=2", "train.steps=9", kind="preempted")
    assert code == 4 and len(read_incidents(tmp_path)) == 3
    assert "error: gave up after 3 preemptions (fault.max_preemptions=2): rank 0" in capsys.readouterr().err


def test_restart_appends_to_the_incidents(run, tmp_path) -> None:
    run([2], "fault.max_failures=0")
    before = read_incidents(tmp_path)
    run([1, None])
    assert read_incidents(tmp_path)[0] == before[0] and len(read_incidents(tmp_path)) == 2


def test_permanently_shrunk_cluster_is_a_fault(run, capsys) -> None:
    code, _ = run([3, ClusterError("no slots")], "train.steps=9")
    assert code == 4 and "error: too few workers to continue: no slots" in capsys.readouterr().err
    code, _ = run([ClusterError("no slots")])
    assert code == 2


def test_stop_between_generations_only_saves_the_state_in_memory(run, tmp_path, capsys) -> None:
    code, workers = run([3, None], "train.steps=9", "eval.interval=3", held_steps=(2, 3), stops=True)
    assert code == 3 and len(workers.specs) == 2
    saving = workers.specs[1]
    assert (saving.start_step, saving.end_step, saving.memory_step) == (3, 3, 3), "no step is trained"
    assert saving.has_pending_checkpoint and saving.pending_eval_metrics is None
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], result["steps"]) == ("stopped", 3)
    assert "stopped at step 3 of 9" in capsys.readouterr().out


def test_stop_between_generations_needs_no_workers_if_all_is_saved(run, tmp_path) -> None:
    with pytest.raises(SystemExit) as exit_info:  # a run of its own, for its checkpoint
        main(["train", *SMALL_OVERRIDES, f"run.dir={tmp_path}", "train.steps=2", "cluster.workers=0"])
    assert not exit_info.value.code
    for held_steps, generations in (((), 1), ((1, 2), 1), ((2, 3), 2)):
        code, workers = run([1, None], "train.steps=4", held_steps=held_steps, stops=True)
        assert code == 3 and len(workers.specs) == generations, held_steps
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["checkpoint"] == f"{tmp_path}/checkpoints/step-00000002"
