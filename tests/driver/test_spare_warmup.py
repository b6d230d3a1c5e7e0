"""Warm-up calls of spares, on a fake Ray: when they are made, when a spare counts as warm, and what a failure does."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_hpc.driver import spare_warmup
from raytrain_hpc.driver.spare_warmup import SpareWarmup, WarmupState
from raytrain_hpc.planner.layout import Layout
from tests.driver.fake_ray import FakeRef
from tests.warm_pool import make_small_config, make_worker_spec


class Spare:
    """A worker whose warm-up calls end on command."""

    def __init__(self) -> None:
        self.warmup, self.calls, self.cancelled = WarmupState(), [], []
        self.actor = SimpleNamespace(
            warm_up=SimpleNamespace(remote=self._warm_up), cancel_warmup=SimpleNamespace(remote=self.cancelled.append)
        )

    def _warm_up(self, spec_ref: Any) -> FakeRef:
        self.calls.append(spec_ref)
        return FakeRef()


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: FakeRef) -> Any:
        if reference.error is not None:
            raise reference.error
        return reference.value

    def wait(references: list[FakeRef], timeout: float) -> tuple[list[FakeRef], list[FakeRef]]:
        return [ref for ref in references if ref.ready], [ref for ref in references if not ref.ready]

    monkeypatch.setattr(spare_warmup, "ray", SimpleNamespace(get=get, wait=wait))


def make_spec(generation: int, **sizes: int) -> Any:
    spec = make_worker_spec(make_small_config(None), 1, steps_to=5)
    return replace(spec, generation=generation, layout=Layout(**sizes))


def begin(warmups: SpareWarmup, generation: int, **sizes: int) -> None:
    warmups.begin_generation(make_spec(generation, **sizes), f"spec {generation}")


def test_a_spare_is_cold_until_it_has_compiled_for_the_layout() -> None:
    spare, warmups = Spare(), SpareWarmup()
    assert spare.warmup.is_cold
    begin(warmups, 1, dp_replicate=4)
    for _ in range(2):
        assert warmups.update([spare]) == [] and spare.warmup.is_cold
    spare.warmup.call.resolve("")
    begin(warmups, 2, dp_replicate=3)
    for _ in range(2):
        assert warmups.update([spare]) == [] and not spare.warmup.is_cold
    assert spare.calls == ["spec 1"], "the number of replicas does not matter"
    begin(warmups, 3, dp_replicate=2, tp=2)
    warmups.update([spare])
    assert spare.calls == ["spec 1", "spec 3"] and spare.warmup.is_cold


def test_the_warm_up_of_a_new_member_is_cut_short() -> None:
    spare, busy, warmups = Spare(), Spare(), SpareWarmup()
    begin(warmups, 1, tp=2)
    warmups.update([spare, busy])
    spare.warmup.call.resolve("")
    warmups.update([spare, busy])
    begin(warmups, 2, tp=2)
    warmups.begin_run([spare, busy])
    assert (spare.cancelled, busy.cancelled) == ([], [1])
    assert not spare.warmup.is_cold and not busy.warmup.is_cold
    begin(warmups, 3, tp=2)
    warmups.update([spare, busy])
    assert (len(spare.calls), len(busy.calls)) == (1, 2), "as a spare again, it is warmed up for all ranks"


def test_a_failed_warm_up_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    spares, warmups = [Spare(), Spare()], SpareWarmup()
    begin(warmups, 1)
    warmups.update(spares)
    for spare in spares:
        spare.warmup.call.resolve("OutOfMemoryError: 3 GiB")
    with caplog.at_level(logging.WARNING):
        assert warmups.update(spares) == []
    assert [record.getMessage().endswith(": OutOfMemoryError: 3 GiB") for record in caplog.records] == [True]
    assert not any(spare.warmup.is_cold for spare in spares), "they are used as they are"
    warmups.update(spares)
    assert [len(spare.calls) for spare in spares] == [1, 1]


def test_processes_that_die_are_returned_and_after_three_none_is_warmed_up() -> None:
    warmups, calls = SpareWarmup(), []
    begin(warmups, 1)
    for _ in range(4):
        spare = Spare()
        warmups.update([spare])
        calls.append(len(spare.calls))
        if spare.warmup.call is not None:
            spare.warmup.call.resolve(error=ActorDiedError())
            assert warmups.update([spare]) == [spare]
    assert calls == [1, 1, 1, 0]
