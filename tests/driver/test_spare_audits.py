"""Audits by spares of runs on Ray: a wrong rank or spare is named, and the losses are those of a run without faults."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raytrain_hpc as rt
from raytrain_hpc.config.schema import Config
from raytrain_hpc.runtime.audit_sample import SampleStore
from raytrain_hpc.runtime.control_channel import ControlChannel
from tests.driver.cli_process import read_curve
from tests.driver.test_ray_faults import make_config, read_incidents

STEPS, INTERVAL = 24, 3
RANKS_ONLY_ON_REQUEST = "fault.audit_interval=1000"
WORDS = [
    "cluster.workers=3",
    "cluster.min_workers=3",
    "cluster.spares=1",
    f"train.steps={STEPS}",
    "train.global_batch_size=3",
    f"fault.spare_audit_interval={INTERVAL}",
    "fault.keep_verified_state=true",
    "fault.stall_timeout=30",
]


class WaitForSpare(rt.Callback):
    """Wait after each sample until a spare has begun to audit it, in the first `generations`. Then wait a little.

    Ranks that are to end the generation do not wait: their last sample is not taken.
    """

    def __init__(self, generations: int):
        self._generations = generations

    def on_generation_start(self) -> None:
        self._has_untaken, self._is_ending = threading.Event(), threading.Event()
        put, take = SampleStore.put, SampleStore.take  # of this process

        def put_and_note(store: SampleStore, sample: Any, weights: Any) -> None:
            put(store, sample, weights)
            self._has_untaken.set()

        def take_and_note(store: SampleStore) -> Any:
            taken = take(store)
            if taken[0] is not None:
                self._has_untaken.clear()
            return taken

        def request_and_note(channel: ControlChannel, kind: Any, generation: Any = None) -> None:
            request(channel, kind, generation)
            self._is_ending.set()

        request = ControlChannel.request
        SampleStore.put, SampleStore.take = put_and_note, take_and_note  # type: ignore[method-assign]
        ControlChannel.request = request_and_note  # type: ignore[method-assign]

    def post_commit(self, metrics: dict[str, Any]) -> None:
        deadline = time.monotonic() + 60
        is_auditing = self.context.generation <= self._generations and metrics["step"] < STEPS
        while is_auditing and self._has_untaken.is_set() and time.monotonic() < deadline:
            is_auditing = not self._is_ending.wait(0.01)
        time.sleep(0.05)


def run(run_dir: Path, generations: int, *words: str, **arguments: Any) -> Any:
    """Train; let a spare audit all samples in the first generations."""
    config = make_config(run_dir, *WORDS, *words)
    return rt.train(config, callbacks=[WaitForSpare(generations)], quiet=True, **arguments)


def describe(run_dir: Path) -> list[tuple[str, int | None, int | None]]:
    return [(incident["kind"], incident["rank"], incident["steps_lost"]) for incident in read_incidents(run_dir)]


@pytest.fixture(scope="module")
def expected_curve(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Any:
    run_dir = tmp_path_factory.mktemp("clean")
    rt.train(make_config(run_dir, *WORDS, "fault.audit_interval=0"), quiet=True)
    return read_curve(run_dir, STEPS)


@pytest.mark.parametrize("words", [[], ["parallel.zero=3", "train.dtype=bf16", "cluster.spares=2"]], ids=" ".join)
def test_spares_audit_while_ranks_train(ray_cluster: None, tmp_path: Path, words: list[str], capfd: Any) -> None:
    """Also with two spares that compute sharded weights together."""
    config = make_config(tmp_path / "run", *WORDS, "fault.audit_interval=8", *words)
    result = rt.train(config, callbacks=[WaitForSpare(1)])
    assert (result.outcome, result.restarts) == ("done", 0)
    assert not (tmp_path / "run" / "incidents.jsonl").exists()
    assert "audits  spares have computed" in capfd.readouterr().out


def test_a_transient_fault_of_a_rank_is_undone(expected_curve: Any, tmp_path: Path) -> None:
    """No other rank audits its step. Afterwards it is known that the rank was wrong, and not the spare."""
    fault = "fault.inject=[{kind: bitflip_gradient, rank: 1, step: 12, bit: 12}]"
    result = run(tmp_path, 2, RANKS_ONLY_ON_REQUEST, fault)
    assert (result.outcome, result.restarts) == ("done", 1)
    assert read_curve(tmp_path, STEPS) == expected_curve
    disputed, transient = read_incidents(tmp_path)
    assert (disputed["kind"], disputed["rank"], transient["kind"], transient["rank"]) == (
        *("disputed", 1),
        *("silent corruption", 1),
    )
    assert "of step 12 differently" in disputed["reason"] and "gradient of" in transient["reason"]
    assert disputed["steps_lost"] >= 12, "back to the start: nothing later was audited by ranks"


def test_a_broken_rank_is_found_by_a_spare_and_named_by_a_rank(expected_curve: Any, tmp_path: Path) -> None:
    fault = "fault.inject=[{kind: bitflip_activation, rank: 2, step: 13, bit: 12, persistent: true}]"
    result = run(tmp_path, 1, RANKS_ONLY_ON_REQUEST, fault)
    assert (result.outcome, result.restarts) == ("done", 2)
    assert read_curve(tmp_path, STEPS) == expected_curve
    assert [(kind, rank) for kind, rank, _ in describe(tmp_path)][:2] == [("disputed", 2), ("faulty device", 2)]


class LinearWithBrokenSpare(nn.Module):
    """A model that computes something else in the first process that is no rank, from its third pass on."""

    num_passes = 0  # of this process, as a spare

    def __init__(self, config: Config):
        super().__init__()
        self.embedding = nn.Embedding(config.model.vocab_size, 16)
        self.head = nn.Linear(16, config.model.vocab_size)
        self._run_dir = Path(config.run.dir)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits * 1.25 if self.training and self._is_broken() else logits

    def _is_broken(self) -> bool:
        path, workers = self._run_dir / "broken", self._run_dir / "workers.json"
        if workers.exists() and os.getpid() not in [w["pid"] for w in json.loads(workers.read_text())["workers"]]:
            LinearWithBrokenSpare.num_passes += 1
            try:
                with path.open("x") as file:
                    file.write(str(os.getpid()))
            except FileExistsError:
                pass
        return self.num_passes >= 3 and path.read_text() == str(os.getpid())


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@pytest.mark.parametrize("num_spares", [1, 2])
def test_a_broken_spare_is_replaced(ray_cluster: None, tmp_path: Path, num_spares: int) -> None:
    """A second spare tells who is wrong while the ranks train on."""
    model = {"model": LinearWithBrokenSpare, "loss": compute_loss}
    rt.train(make_config(tmp_path / "clean", *WORDS, "fault.audit_interval=0", "cluster.spares=0"), quiet=True, **model)
    result = run(tmp_path / "run", 2, "fault.audit_interval=5", f"cluster.spares={num_spares}", **model)
    assert (result.outcome, result.restarts) == ("done", 1 if num_spares == 1 else 0)
    assert read_curve(tmp_path / "run", STEPS) == read_curve(tmp_path / "clean", STEPS)
    incidents = {incident["kind"]: incident for incident in read_incidents(tmp_path / "run")}
    if num_spares == 1:
        assert {"disputed", "faulty device"} <= set(incidents) <= {"disputed", "faulty device", "silent corruption"}
    else:
        assert set(incidents) == {"faulty device"}
    broken = int((tmp_path / "run" / "broken").read_text())
    of_spares = [incident for kind, incident in incidents.items() if kind != "disputed"]
    assert {(incident["rank"], incident["pid"]) for incident in of_spares} == {(None, broken)}
