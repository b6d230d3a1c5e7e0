"""How often a run is started anew, and what its incidents say, with workers that fail on command. No Ray."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.cli.main import main
from raytrain_hpc.driver import supervisor
from raytrain_hpc.elastic.recovery import Candidate
from raytrain_hpc.elastic.state_partition import StatePart
from raytrain_hpc.errors import ClusterError, WorkerFailedError
from raytrain_hpc.planner.topology import Node, Topology
from tests.warm_pool import SMALL_OVERRIDES


def metrics(step: int, generation: int) -> dict[str, Any]:
    zero = ("lr", "grad_norm", "loss", "tokens")
    return {
        **{f"train/{name}": 0.0 for name in zero},
        "throughput/tokens_per_sec": 1.0,
        "throughput/tokens_per_sec_per_device": 1.0,
        "memory/peak_gib": 0.0,
        "time/unix": time.time(),
        "time/step_s": 0.001,
        "elastic/world_size": 1,
        "elastic/generation": generation,
        "step": step,
    }


class FakeWorkerGroup:
    """Each generation reports some steps and fails; with None as its number it goes to the end. An exception in the
    place of a number: nobody comes up any more. `holds`: what the worker that is left has in memory after a failure."""

    def __init__(self, plan: list[int | Exception | None], holds: tuple[int, ...]):
        self.plan, self.holds, self.closed = plan, holds, False
        self.specs: list[Any] = []

    @property
    def _next(self) -> int | Exception | None:
        return self.plan[min(len(self.specs), len(self.plan) - 1)]

    def start(self) -> None:
        self.wait_for_workers(1)

    def wait_for_workers(self, count: int) -> None:
        if isinstance(self._next, Exception):
            raise self._next

    def scale_up_to(self, count: int) -> None:
        assert count == 1, "nobody asked for more"

    def list_candidates(self) -> list[Candidate]:
        if isinstance(self._next, Exception):
            return []
        return [Candidate(0, "n", 7, tuple(StatePart(1, 0, 1, step) for step in self.holds) if self.specs else ())]

    def set_members(self, members: tuple[int, ...]) -> list[dict[str, Any]]:
        who = {"rank": 0, "rack": "", "node": "n", "host": "h", "pid": 7, "device": "cpu", "memory_gib": None}
        return [who | {"began": time.time(), "imported": time.time()}]

    def run_generation(
        self,
        spec: Any,
        on_record: Callable[[dict[str, Any]], None],
        stop_event: threading.Event,
        poll_regroup: Callable[[], Any],
    ) -> str:
        assert poll_regroup() is None
        planned = self._next
        on_record({"type": "ready", "rank": 0, "model": time.time() + 100.0 * len(self.specs)})
        self.specs.append(spec)
        steps = spec.steps_to if planned is None else spec.first + planned
        for step in range(spec.first + 1, steps + 1):
            on_record({"type": "step", "metrics": metrics(step, spec.generation)})
        if planned is None:
            return "done"
        now = time.time()
        raise WorkerFailedError(0, "n", 7, "died", "the reason", detected_at=now, last_seen=now - 0.25)

    def recall_metrics(self, after_step: int, until_step: int) -> list[dict[str, Any]]:
        """What it had committed and nobody had heard of."""
        return [metrics(step, 1) for step in range(after_step + 1, until_step + 1)]

    def discard_state(self) -> None:
        self.holds = ()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, FakeWorkerGroup]]:
    """Runs the command with a crew whose generations go as planned; the last plan is repeated for ever."""

    def start(
        plan: list[int | Exception | None], *words: str, holds: tuple[int, ...] = ()
    ) -> tuple[int, FakeWorkerGroup]:
        crew = FakeWorkerGroup(plan, holds)

        class FakeBackend:
            world, cluster = 1, Topology((Node("local", "127.0.0.1", 1),), "cpu")
            is_external = False

            def create_worker_group(self, config: Any) -> FakeWorkerGroup:
                return crew

        @contextmanager
        def fleet(config: Any) -> Any:
            yield FakeBackend()

        monkeypatch.setattr(supervisor, "open_backend", fleet)
        with pytest.raises(SystemExit) as ended:
            main(["train", *SMALL_OVERRIDES, f"run.dir={tmp_path}", *words])
        assert crew.closed
        return ended.value.code or 0, crew

    return start


def incidents(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "incidents.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("limit", [0, 2])
def test_a_worker_that_fails_every_time(run, tmp_path, capsys, limit: int) -> None:
    code, crew = run([3], f"fault.max_failures={limit}")
    assert (code, len(crew.specs), len(incidents(tmp_path))) == (4, limit + 1, limit + 1)
    (error,) = capsys.readouterr().err.splitlines()
    gave_up = f"gave up after {limit + 1} failures (fault.max_failures={limit})"
    assert error == f"error: {gave_up}: rank 0 (node n, pid 7) died: the reason"
    assert not (tmp_path / "result.json").exists()


def test_what_a_recovery_cost(run, tmp_path, capsys) -> None:
    code, _ = run([3, 0, None])
    assert code == 0
    first, second = incidents(tmp_path)
    keys = ("kind", "rank", "node", "pid", "operation", "generation", "step", "steps_lost")
    assert [first[key] for key in keys] == ["died", 0, "n", 7, "training step 4", 1, 3, 3]
    assert [second[key] for key in keys] == ["died", 0, "n", 7, "training step 1", 2, 0, 0]
    assert first["detected_s"] == second["detected_s"] == pytest.approx(0.25, abs=1e-3)
    assert first["recovered_s"] is None, "the second failure came before any step"
    assert 0 < second["recovered_s"] < 5
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["restarts"] == 2
    parts = result["startup"]
    assert 2 * parts["total_s"] == pytest.approx(sum(parts.values())), "of the first generation, not of later ones"
    assert result["goodput"] * result["wall_s"] == pytest.approx(result["steps"] * 0.001), "repeated steps count once"
    said = capsys.readouterr().out
    assert "worker failed: rank 0 (node n, pid 7) died: the reason; 3 steps are committed" in said
    assert said.count("recovered: rank 0 died at step 1; 1 -> 1 ranks; 0 steps lost; ") == 1


def test_going_on_from_memory(run, tmp_path) -> None:
    """A step that was committed and not heard of is recorded first; its evaluation and checkpoint are made up for."""
    words = ("fault.max_failures=1", "train.steps=9", "train.eval_every=5", "checkpoint.every=5")
    code, crew = run([3, None], *words, holds=(4, 5))
    assert code == 0
    (incident,) = incidents(tmp_path)
    assert (incident["step"], incident["steps_lost"], incident["world"], incident["world_after"]) == (5, 0, 1, 1)
    later = crew.specs[1]
    assert (later.memory_step, later.resume_step, later.first, later.unsaved) == (5, None, 5, True)
    assert later.unevaluated["step"] == 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))


def test_failures_count_only_where_nothing_was_gained_between_them(run, tmp_path) -> None:
    code, crew = run([3, 2, 1, 0, 0, 1, None], "fault.max_failures=2", "train.steps=9", holds=())
    assert code == 4, "without memory each begins anew, and the first was the furthest"
    assert len(incidents(tmp_path)) == 3


def test_a_later_life_adds_to_the_incidents(run, tmp_path) -> None:
    run([2], "fault.max_failures=0")
    before = incidents(tmp_path)
    run([1, None])
    assert incidents(tmp_path)[0] == before[0] and len(incidents(tmp_path)) == 2


def test_a_cluster_that_shrank_for_good_is_a_fault_and_not_a_wrong_input(run, capsys) -> None:
    code, _ = run([3, ClusterError("no slots")], "train.steps=9")
    assert code == 4 and "error: gave up after 1 failures: no slots" in capsys.readouterr().err
    code, _ = run([ClusterError("no slots")])
    assert code == 2
