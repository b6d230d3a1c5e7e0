"""Readings of the agents of other nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver import health_monitor
from raytrain_hpc.driver.node_agent import NodeHealth
from raytrain_hpc.elastic.watchdog import Suspect


class FakeActor:
    """An agent whose replies are sent by hand: `requests` has a list for each request, which the reply is put into."""

    def __init__(self) -> None:
        self.requests: list[list[NodeHealth]] = []
        self.get_health = SimpleNamespace(remote=self._request)
        self.watch = SimpleNamespace(remote=lambda *arguments: None)

    def _request(self) -> Any:
        self.requests.append([])
        return self.requests[-1]


def test_a_reply_about_the_last_generation_names_no_suspects_of_this_one() -> None:
    actor = FakeActor()
    agents = SimpleNamespace(options=lambda **named: SimpleNamespace(remote=lambda *arguments: actor))
    with (
        mock.patch.object(health_monitor, "AgentActor", agents),
        mock.patch.object(health_monitor, "NodeAffinitySchedulingStrategy", mock.Mock()),
        mock.patch.object(health_monitor, "ray", SimpleNamespace(get=lambda reply: reply[0])),
    ):
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
