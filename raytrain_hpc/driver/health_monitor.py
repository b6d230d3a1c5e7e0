"""All agents of a run: one a node that has workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.node_agent import Agent, Pulses, Seen
from raytrain_hpc.driver.ray_topology import doors
from raytrain_hpc.elastic.watchdog import Signs, Suspect, lost_nodes

_EVERY_S = 0.1  # between an answer of an agent elsewhere and the next question
_A_SECOND = 1000  # questions at most, to all agents together
_AGAIN_S = 5.0  # between one that died and the first question to the one that follows
_ANSWER_S = 1.0
_ORPHANED_S = 300.0  # a driver whose storage answers nothing for a while asks nobody either
_DUE_S, _KNOCK_S = 0.1, 0.02  # an answer takes less; so does a door that is there
_SETTLE_S, _SETTLE_STEPS = 10.0, 3.0

AgentActor = ray.remote(num_cpus=0, max_restarts=0)(Agent)


class _AgentElsewhere:
    """The agent of another node, asked again and again behind what runs."""

    def __init__(self, config: Config, node: str, door: tuple[str, int] | None):
        self._config, self._node, self._door = config, node, door
        self._pulses: Pulses = {}
        self.heard = Seen([], {})
        self.actor: Any = None
        self._answer: Any = None
        self._owing_since: float | None = None
        self._answered, self._up = 0.0, False  # when it said something last, and whether it has ever
        self._start()

    def watch(self, pulses: Pulses) -> None:
        """From now on these are the ranks of its node."""
        self._pulses, self.heard = pulses, Seen([], {})
        self.actor.watch.remote(pulses)

    @property
    def answer(self) -> Any:
        """What it was asked and has not been heard to answer; None where nothing is."""
        return self._answer

    def hear(self) -> None:
        """Take what it has said. One that has died is followed by another."""
        self._answered = time.monotonic()
        try:
            self.heard, self._owing_since = ray.get(self._answer), None
            self._up = True
        except ActorUnavailableError:  # perhaps for good: then its silence tells
            pass
        except RayError:
            self._start()
            self.actor.watch.remote(self._pulses)
            self._answered += _AGAIN_S
        self._answer = None

    def ask(self, every_s: float) -> None:
        """Ask it again, where it owes no answer and has not given one for so long."""
        now = time.monotonic()
        if self._answer is None and now - self._answered > every_s:
            self._answer = self.actor.look.remote()
            self._owing_since = self._owing_since or now

    def silent_s(self) -> float:
        """For how long it has owed an answer; 0 while it comes up."""
        return 0.0 if self._owing_since is None or not self._up else time.monotonic() - self._owing_since

    def refuses(self) -> bool:
        """Whether it owes an answer, and Ray's own process on its node, with which all others end, is not there.

        A machine that is up says so at once; one that is gone itself says nothing.
        """
        if self.silent_s() < _DUE_S or self._door is None:
            return False
        try:
            socket.create_connection(self._door, timeout=_KNOCK_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _start(self) -> None:
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        options = AgentActor.options(scheduling_strategy=there)  # type: ignore[attr-defined]
        self.actor = options.remote(self._config, _ORPHANED_S)
        self._owing_since, self._up = None, False


class Watch:
    """Asks agents elsewhere behind what runs; the one on this node is looked at directly."""

    def __init__(self, config: Config):
        self._config = config
        self._here: str = ray.get_runtime_context().get_node_id()
        self._own = Agent(config)
        self._others: dict[str, _AgentElsewhere] = {}

    def expect(self, nodes: Iterable[str]) -> None:
        """There will be ranks on these nodes: agents come up beside them, and no slower."""
        new = set(nodes) - {self._here, *self._others}
        known = doors() if new else {}
        for node in new:
            self._others[node] = _AgentElsewhere(self._config, node, known.get(node))

    def begin(self, ranks: Iterable[dict[str, Any]]) -> None:
        """The ranks of a generation, each with its rank, node, pid and pulse (the path of its heartbeat)."""
        by_node: dict[str, dict[int, tuple[int, str]]] = {self._here: {}}
        for info in ranks:
            by_node.setdefault(info["node"], {})[info["rank"]] = info["pid"], info["pulse"]
        for node in self._others.keys() - by_node.keys():
            self._others[node].watch({})
        self._own.watch(by_node.pop(self._here))
        self.expect(by_node)
        for node, pulses in by_node.items():
            self._others[node].watch(pulses)

    def suspects(self) -> list[Suspect]:
        """Who shows no life, as far as agents have said so."""
        self._listen()
        return [one for seen in self._seen() for one in seen.suspects]

    def signs(self) -> dict[int, Signs]:
        """What was seen last of every rank."""
        return {rank: signs for seen in self._seen() for rank, signs in seen.signs.items()}

    def _listen(self) -> None:
        """Take what agents have said, and ask again."""
        owed = {agent.answer: agent for agent in self._others.values() if agent.answer is not None}
        ready, _ = ray.wait(list(owed), num_returns=len(owed), timeout=0) if owed else ([], [])
        for answer in ready:
            owed[answer].hear()
        every_s = max(_EVERY_S, len(self._others) / _A_SECOND)
        for agent in self._others.values():
            agent.ask(every_s)

    def _seen(self) -> list[Seen]:
        return [self._own.look(), *(agent.heard for agent in self._others.values())]

    def lost(self, *, broken: bool) -> list[str]:
        """Nodes that do not answer any more. `broken`: whether the end of a rank has been heard of."""
        self._listen()
        silent_s = {node: agent.silent_s() for node, agent in self._others.items()}
        refusing = [node for node, agent in self._others.items() if broken and agent.refuses()]
        return lost_nodes(silent_s, broken=broken, refusing=refusing)

    def forget(self, node: str) -> None:
        """A node is given up on, and its agent with it."""
        agent = self._others.pop(node, None)
        if agent is not None:
            ray.kill(agent.actor, no_restart=True)

    def settle_s(self) -> float:
        """How long ranks may take to end after one of them has: until their next collective, which breaks."""
        return max(_SETTLE_S, _SETTLE_STEPS * max((one.step_s or 0.0 for one in self.signs().values()), default=0.0))

    def stacks(self) -> dict[int, str]:
        """What the threads of all ranks are at."""
        asked = [agent.actor.stacks.remote() for agent in self._others.values()]
        found = self._own.stacks()
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S) if asked else ([], [])
        for answer in ready:
            found |= _said(answer)
        return found

    def kill(self, node: str, rank: int) -> None:
        """End a rank by its pid."""
        if node == self._here:
            self._own.kill(rank)
        elif node in self._others:
            self._others[node].actor.kill.remote(rank)

    def close(self) -> None:
        """End the agents."""
        self._own.close()
        for node in list(self._others):
            self.forget(node)


def _said(answer: Any) -> dict[int, str]:
    """What an agent said; nothing where it is gone with its node, which is heard otherwise."""
    try:
        found: dict[int, str] = ray.get(answer)
    except RayError:
        return {}
    return found
