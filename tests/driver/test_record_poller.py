"""When ranks are polled for records: ranks that reply at once, on a simulated clock."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.driver import record_poller, throttle
from raytrain_hpc.driver.record_poller import RecordPoller
from raytrain_hpc.elastic.watchdog import WorkerHealth

HEALTHY = WorkerHealth(0, True, False, 0.0, 0.0, "training", 1, 0.1)


class Clock:
    """A clock that the test advances. It starts long after the epoch, as real time does."""

    now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


class FakeRef:
    """An object reference, compared by identity."""

    def __init__(self, records: list[Any]):
        self.records = records


class FakeRank:
    """An actor that replies at once with its records, and notes when it was polled."""

    def __init__(self, clock: Clock):
        self.clock, self.records, self.poll_times = clock, [], []
        self.drain = SimpleNamespace(remote=self.take)

    def take(self) -> FakeRef:
        self.poll_times.append(round(self.clock.now - Clock.now, 2))
        taken, self.records = self.records, []
        return FakeRef(taken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake_ray = SimpleNamespace(
        wait=lambda refs, num_returns, timeout: (refs, []),
        get=lambda ref: ref.records,
    )
    monkeypatch.setattr(record_poller, "ray", fake_ray)
    monkeypatch.setattr(record_poller, "time", clock)
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def poll_until(
    clock: Clock, ranks: list[FakeRank], urgent: dict[int, list[float]], until_s: float
) -> list[tuple[Any, float]]:
    """Poll every 0.05 s; return records with their arrival times. `urgent`: when each rank emits an urgent record."""
    received: list[tuple[Any, float]] = []
    poller = RecordPoller(ranks, lambda record: received.append((record, round(clock.now - Clock.now, 2))))
    num_urgent = dict.fromkeys(range(len(ranks)), 0)
    for _ in range(round(until_s / 0.05)):
        clock.now += 0.05
        for rank, times in urgent.items():
            while num_urgent[rank] < len(times) and clock.now - Clock.now >= times[num_urgent[rank]]:
                ranks[rank].records.append(f"shard of {rank}")
                num_urgent[rank] += 1
        poller.poll(
            {rank: replace(HEALTHY, rank=rank, num_urgent_records=number) for rank, number in num_urgent.items()}
        )
    return received


def test_urgent_records_are_fetched_at_once_and_once(clock: Clock) -> None:
    ranks = [FakeRank(clock) for _ in range(3)]
    received = poll_until(clock, ranks, {1: [0.2, 0.72]}, 0.95)
    assert [record for record, _ in received] == ["shard of 1"] * 2
    assert [when for _, when in received] == [pytest.approx(0.25, abs=0.06), pytest.approx(0.8, abs=0.06)]
    assert len(ranks[1].poll_times) == 2
    assert ranks[0].poll_times == ranks[2].poll_times == []


def test_ranks_are_polled_once_per_second(clock: Clock) -> None:
    ranks = [FakeRank(clock) for _ in range(2)]
    poll_until(clock, ranks, {}, 4.9)
    assert [len(rank.poll_times) for rank in ranks] == [4, 4]


def test_urgent_polls_respect_the_rate_limit(clock: Clock) -> None:
    ranks = [FakeRank(clock) for _ in range(1000)]
    poll_until(clock, ranks, {rank: [0.5, 0.6, 0.7, 0.8] for rank in range(1000)}, 4.0)
    num_polls = sum(len(rank.poll_times) for rank in ranks[1:])
    assert num_polls <= 500 * 4


def test_a_record_that_takes_long_to_handle_makes_no_rank_silent(clock: Clock) -> None:
    """As when a disk is slow: replies have arrived, but the driver was busy."""
    ranks, handled = [FakeRank(clock), FakeRank(clock)], []
    ranks[0].records = ["step"]

    def handle(record: Any) -> None:
        handled.append(record)
        clock.now += 12.5

    poller = RecordPoller(ranks, handle)
    for _ in range(600):
        clock.now += 0.05
        poller.poll({})
        assert poller.find_silent_ranks() == []
    assert handled == ["step"]
    assert all(rank.poll_times[-1] > 39 for rank in ranks), "they are polled again within seconds"


def test_a_rank_that_does_not_reply_is_silent_after_ten_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_poller.ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    poller = RecordPoller([FakeRank(clock)], lambda record: None)
    silent_at = []
    for _ in range(300):
        clock.now += 0.05
        poller.poll({})
        silent_at += [clock.now - Clock.now] * bool(poller.find_silent_ranks())
    assert silent_at[0] == pytest.approx(11.0, abs=0.2)
