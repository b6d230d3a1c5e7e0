"""All agents of a run: one a node that has workers."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_hpc.config import Config
from raytrain_hpc.driver.agent import Agent, Pulses
from raytrain_hpc.plan.watch import Suspect

_EVERY_S = 0.1  # between two questions to an agent elsewhere
_ANSWER_S = 1.0
_SETTLE_S, _SETTLE_STEPS = 10.0, 3.0

AgentActor = ray.remote(num_cpus=0, max_restarts=0)(Agent)


class Watch:
    """Asks agents elsewhere behind what runs; the one on this node is looked at directly."""

    def __init__(self, config: Config):
        self._config = config
        self._here: str = ray.get_runtime_context().get_node_id()
        self._own = Agent(config)
        self._others: dict[str, Any] = {}
        self._asked: dict[str, tuple[float, Any]] = {}
        self._heard: dict[str, list[Suspect]] = {}

    def begin(self, ranks: Iterable[dict[str, Any]]) -> None:
        """The ranks of a generation, each with its rank, node, pid and pulse (the path of its heartbeat)."""
        by_node: dict[str, dict[int, tuple[int, str]]] = {self._here: {}, **{node: {} for node in self._others}}
        for info in ranks:
            by_node.setdefault(info["node"], {})[info["rank"]] = info["pid"], info["pulse"]
        self._heard, self._asked = {}, {}
        for node, pulses in by_node.items():
            self._tell(node, pulses)

    def suspects(self) -> list[Suspect]:
        """Who shows no life, as far as agents have said so."""
        now = time.monotonic()
        for node, agent in self._others.items():
            when, answer = self._asked.get(node, (0.0, None))
            if answer is not None and ray.wait([answer], timeout=0)[0]:
                self._heard[node], answer = _said(answer), None
                self._asked[node] = when, None
            if answer is None and now - when > _EVERY_S:
                self._asked[node] = now, agent.suspects.remote()
        return [*self._own.suspects(), *(one for heard in self._heard.values() for one in heard)]

    def settle_s(self) -> float:
        """How long ranks may take to end after one of them has: until their next collective, which breaks."""
        return max(_SETTLE_S, _SETTLE_STEPS * (self._own.step_s() or 0.0))

    def stacks(self) -> dict[int, str]:
        """What the threads of all ranks are at."""
        asked = [agent.stacks.remote() for agent in self._others.values()]
        found = self._own.stacks()
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for answer in ready:
            found |= dict(_said(answer))
        return found

    def kill(self, node: str, rank: int) -> None:
        """End a rank by its pid."""
        if node == self._here:
            self._own.kill(rank)
        elif node in self._others:
            self._others[node].kill.remote(rank)

    def close(self) -> None:
        """End the agents."""
        self._own.watch({})
        for agent in self._others.values():
            ray.kill(agent, no_restart=True)
        self._others = {}

    def _tell(self, node: str, pulses: Pulses) -> None:
        if node == self._here:
            self._own.watch(pulses)
            return
        if node not in self._others:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._others[node] = AgentActor.options(scheduling_strategy=there).remote(self._config)  # type: ignore[attr-defined]
        self._others[node].watch.remote(pulses)


def _said(answer: Any) -> Any:
    """What an agent said; nothing where it is gone with its node, which is heard otherwise."""
    try:
        return ray.get(answer)
    except RayError:
        return []
