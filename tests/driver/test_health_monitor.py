"""Readings of the agents of other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import health_monitor
from raytrain_hpc.driver.node_agent import NodeHealth
from raytrain_hpc.elastic.watchdog import Suspect


class Request(list[NodeHealth]):
    """A reference of a reply, which is put into it."""

    __hash__ = object.__hash__


class FakeActor:
    """An agent whose replies are sent by hand: `requests` has a list for each request, which the reply is put into."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.get_health = SimpleNamespace(remote=self._request)
        self.watch = SimpleNamespace(remote=lambda *arguments: None)

    def _request(self) -> Any:
        self.requests.append(Request())
        return self.requests[-1]


@pytest.fixture
def actor() -> Iterator[FakeActor]:
    """The only agent, on a fake Ray on which a reply is there when something was put into its request."""
    actor = FakeActor()
    agents = SimpleNamespace(options=lambda **named: SimpleNamespace(remote=lambda *arguments: actor))
    ray = SimpleNamespace(
        get=lambda reply: reply[0],
        wait=lambda replies, **named: ([reply for reply in replies if reply], [r for r in replies if not r]),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "driver"),
    )
    with (
        mock.patch.object(health_monitor, "AgentActor", agents),
        mock.patch.object(health_monitor, "NodeAffinitySchedulingStrategy", mock.Mock()),
        mock.patch.object(health_monitor, "ray", ray),
    ):
        yield actor


def test_a_reply_about_the_last_generation_names_no_suspects_of_this_one(actor: FakeActor) -> None:
    agent = health_monitor._RemoteAgent(load_config(), "n1", None)
    agent.watch({}, None)
    agent.poll(0.0)
    agent.watch({}, None)  # a new generation begins before the reply is there
    stalled = NodeHealth([Suspect(0, "stalled", 1.1, 0.8)], {})
    actor.requests[0].append(stalled)
    assert agent.pending_reply is None and agent.last_health.suspects == []
    agent.poll(0.0)
    assert agent.pending_reply is actor.requests[1]
    actor.requests[1].append(stalled)
    agent.receive_reply()
    assert agent.last_health == stalled and agent.measure_silence_s() == 0.0


def test_the_time_between_two_generations_is_no_silence(actor: FakeActor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks no agent while it waits for workers, and drops the reply to its last request before that."""
    now = [1000.0]
    monkeypatch.setattr(health_monitor, "time", SimpleNamespace(monotonic=lambda: now[0]))
    agent = health_monitor._RemoteAgent(load_config(), "n1", None)

    def find_lost_nodes(rank_failed: bool) -> list[str]:
        now[0] += 0.2  # polls are a tenth of a second apart
        return monitor.find_lost_nodes(rank_failed=rank_failed)

    with mock.patch.object(health_monitor, "NodeAgent", mock.Mock()):
        monitor = health_monitor.HealthMonitor(load_config())
    monitor._remote_agents["n1"] = agent
    monitor.begin_generation([], None)
    assert find_lost_nodes(False) == []
    actor.requests[0].append(NodeHealth([], {}))
    assert [find_lost_nodes(False) for _ in range(3)] == [[]] * 3 and len(actor.requests) == 2
    now[0] += 60.0  # the last request is outstanding when its generation ends, and replacements start for a minute
    monitor.begin_generation([], None)
    assert [find_lost_nodes(rank_failed) for rank_failed in (False, True, True)] == [[]] * 3
    now[0] += 10.0
    assert find_lost_nodes(False) == ["n1"], "its silence in this generation counts"
