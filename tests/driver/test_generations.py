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

from raytrain_hpc import cli
from raytrain_hpc.driver import supervisor
from raytrain_hpc.errors import ClusterError, WorkerFailed
from tests.pool import SMALL


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


class Crew:
    """Reports some steps, then fails; the last one of the plan goes to the end."""

    def __init__(self, steps: int | Exception | None):
        self.steps, self.closed = steps, False

    def start(self) -> list[dict[str, Any]]:
        if isinstance(self.steps, Exception):
            raise self.steps
        who = {"rank": 0, "node": "n", "host": "h", "pid": 7, "device": "cpu", "memory_gib": None}
        return [who | {"began": time.time(), "imported": time.time()}]

    def run(self, spec: Any, handle: Callable[[dict[str, Any]], None], stop: threading.Event) -> str:
        steps = spec.steps_to if self.steps is None else self.steps
        for step in range(1, steps + 1):
            handle({"type": "step", "metrics": metrics(step, spec.generation)})
        if self.steps is None:
            return "done"
        now = time.time()
        raise WorkerFailed(0, "n", 7, "died", "the reason", detected=now, last_seen=now - 0.25)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, list[Crew]]]:
    """Runs the command with one crew a generation, as planned; the last plan is repeated for ever."""

    def start(plan: list[int | Exception | None], *words: str) -> tuple[int, list[Crew]]:
        crews: list[Crew] = []

        class Fleet:
            world = 1

            def crew(self) -> Crew:
                crews.append(Crew(plan[min(len(crews), len(plan) - 1)]))
                return crews[-1]

        @contextmanager
        def fleet(config: Any) -> Any:
            yield Fleet()

        monkeypatch.setattr(supervisor, "open_fleet", fleet)
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", *SMALL, f"run.dir={tmp_path}", *words])
        assert all(crew.closed for crew in crews if not isinstance(crew.steps, Exception))
        return ended.value.code or 0, crews

    return start


def incidents(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "incidents.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("limit", [0, 2])
def test_a_worker_that_fails_every_time(run, tmp_path, capsys, limit: int) -> None:
    code, crews = run([3], f"fault.max_failures={limit}")
    assert (code, len(crews), len(incidents(tmp_path))) == (4, limit + 1, limit + 1)
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
    assert result["goodput"] * result["wall_s"] == pytest.approx(result["steps"] * 0.001), "repeated steps count once"
    said = capsys.readouterr().out
    assert "worker failed: rank 0 (node n, pid 7) died: the reason; restarting" in said
    assert said.count("recovered: rank 0 died at step 1; 0 steps lost; ") == 1


def test_a_later_life_adds_to_the_incidents(run, tmp_path) -> None:
    run([2], "fault.max_failures=0")
    before = incidents(tmp_path)
    run([1, None])
    assert incidents(tmp_path)[0] == before[0] and len(incidents(tmp_path)) == 2


def test_a_cluster_that_shrank_for_good_is_a_fault_and_not_a_wrong_input(run, capsys) -> None:
    code, _ = run([3, ClusterError("no slots")])
    assert code == 4 and "error: gave up after 1 failures: no slots" in capsys.readouterr().err
    code, _ = run([ClusterError("no slots")])
    assert code == 2
