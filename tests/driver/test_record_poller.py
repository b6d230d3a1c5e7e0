"""Who is asked for records, and when: ranks that answer at once, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.driver import record_poller, throttle
from raytrain_hpc.driver.record_poller import RecordPoller
from raytrain_hpc.elastic.watchdog import WorkerHealth

WELL = WorkerHealth(0, True, False, 0.0, 0.0, "training", 1, 0.1)


class Clock:
    """Time that passes when the test says so; it begins long after the epoch, as real time does."""

    now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


class Answer:
    """As a reference: known by being itself."""

    def __init__(self, records: list[Any]):
        self.records = records


class Rank:
    """An actor that answers at once: every answer is what it has to say, and when it was asked."""

    def __init__(self, clock: Clock):
        self.clock, self.records, self.asked = clock, [], []
        self.drain = SimpleNamespace(remote=self.take)

    def take(self) -> Answer:
        self.asked.append(round(self.clock.now - Clock.now, 2))
        taken, self.records = self.records, []
        return Answer(taken)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    played = SimpleNamespace(
        wait=lambda asked, num_returns, timeout: (asked, []),
        get=lambda answer: answer.records,
    )
    monkeypatch.setattr(record_poller, "ray", played)
    monkeypatch.setattr(record_poller, "time", clock)
    monkeypatch.setattr(throttle, "time", clock)
    return clock


def listened(
    clock: Clock, ranks: list[Rank], urgent: dict[int, list[float]], until_s: float
) -> list[tuple[Any, float]]:
    """Records and when they came, of a driver that looks every 0.05 s; `urgent`: when a rank makes such a record."""
    came: list[tuple[Any, float]] = []
    listener = RecordPoller(ranks, lambda record: came.append((record, round(clock.now - Clock.now, 2))))
    made = dict.fromkeys(range(len(ranks)), 0)
    for _ in range(round(until_s / 0.05)):
        clock.now += 0.05
        for rank, moments in urgent.items():
            while made[rank] < len(moments) and clock.now - Clock.now >= moments[made[rank]]:
                ranks[rank].records.append(f"shard of {rank}")
                made[rank] += 1
        listener.poll({rank: replace(WELL, rank=rank, num_urgent_records=number) for rank, number in made.items()})
    return came


def test_what_is_urgent_is_fetched_at_once_and_once(clock: Clock) -> None:
    ranks = [Rank(clock) for _ in range(3)]
    came = listened(clock, ranks, {1: [0.2, 0.72]}, 0.95)
    assert [record for record, _ in came] == ["shard of 1"] * 2
    assert [when for _, when in came] == [pytest.approx(0.25, abs=0.06), pytest.approx(0.8, abs=0.06)]
    assert len(ranks[1].asked) == 2
    assert ranks[0].asked == ranks[2].asked == []


def test_others_are_asked_once_a_second(clock: Clock) -> None:
    ranks = [Rank(clock) for _ in range(2)]
    listened(clock, ranks, {}, 4.9)
    assert [len(rank.asked) for rank in ranks] == [4, 4]


def test_what_is_urgent_on_thousands_of_ranks_keeps_to_the_rate(clock: Clock) -> None:
    ranks = [Rank(clock) for _ in range(1000)]
    listened(clock, ranks, {rank: [0.5, 0.6, 0.7, 0.8] for rank in range(1000)}, 4.0)
    asked = sum(len(rank.asked) for rank in ranks[1:])
    assert asked <= 500 * 4
