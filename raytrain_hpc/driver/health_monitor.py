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
from raytrain_hpc.driver.node_agent import HeartbeatPaths, NodeAgent, NodeHealth
from raytrain_hpc.driver.ray_topology import get_raylet_addresses
from raytrain_hpc.elastic.watchdog import Suspect, WorkerHealth, find_lost_nodes

_POLL_INTERVAL_S = 0.1  # between an answer of an agent elsewhere and the next question
_MAX_POLLS_PER_S = 1000  # questions at most, to all agents together
_RESTART_DELAY_S = 5.0  # between one that died and the first question to the one that follows
_STACKS_TIMEOUT_S = 1.0
_ORPHAN_TIMEOUT_S = 300.0  # a driver whose storage answers nothing for a while asks nobody either
_REPLY_DUE_S, _CONNECT_TIMEOUT_S = 0.1, 0.02  # an answer takes less; so does a door that is there
_MIN_SETTLE_S, _SETTLE_STEPS = 10.0, 3.0

AgentActor = ray.remote(num_cpus=0, max_restarts=0)(NodeAgent)


class _RemoteAgent:
    """The agent of another node, asked again and again behind what runs."""

    def __init__(self, config: Config, node: str, raylet_address: tuple[str, int] | None):
        self._config, self._node, self._raylet_address = config, node, raylet_address
        self._heartbeats: HeartbeatPaths = {}
        self.last_health = NodeHealth([], {})
        self.actor: Any = None
        self._reply: Any = None
        self._waiting_since: float | None = None
        self._last_reply_time, self._has_replied = 0.0, False  # when it said something last, and whether it has ever
        self._start_actor()

    def watch(self, heartbeats: HeartbeatPaths) -> None:
        """From now on these are the ranks of its node."""
        self._heartbeats, self.last_health = heartbeats, NodeHealth([], {})
        self.actor.watch.remote(heartbeats)

    @property
    def pending_reply(self) -> Any:
        """What it was asked and has not been heard to answer; None where nothing is."""
        return self._reply

    def receive_reply(self) -> None:
        """Take what it has said. One that has died is followed by another."""
        self._last_reply_time = time.monotonic()
        try:
            self.last_health, self._waiting_since = ray.get(self._reply), None
            self._has_replied = True
        except ActorUnavailableError:  # perhaps for good: then its silence tells
            pass
        except RayError:
            self._start_actor()
            self.actor.watch.remote(self._heartbeats)
            self._last_reply_time += _RESTART_DELAY_S
        self._reply = None

    def poll(self, interval_s: float) -> None:
        """Ask it again, where it owes no answer and has not given one for so long."""
        now = time.monotonic()
        if self._reply is None and now - self._last_reply_time > interval_s:
            self._reply = self.actor.look.remote()
            self._waiting_since = self._waiting_since or now

    def measure_silence_s(self) -> float:
        """For how long it has owed an answer; 0 while it comes up."""
        return 0.0 if self._waiting_since is None or not self._has_replied else time.monotonic() - self._waiting_since

    def is_raylet_down(self) -> bool:
        """Whether it owes an answer, and Ray's own process on its node, with which all others end, is not there.

        A machine that is up says so at once; one that is gone itself says nothing.
        """
        if self.measure_silence_s() < _REPLY_DUE_S or self._raylet_address is None:
            return False
        try:
            socket.create_connection(self._raylet_address, timeout=_CONNECT_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        return False

    def _start_actor(self) -> None:
        there = NodeAffinitySchedulingStrategy(self._node, soft=False)
        options = AgentActor.options(scheduling_strategy=there)  # type: ignore[attr-defined]
        self.actor = options.remote(self._config, _ORPHAN_TIMEOUT_S)
        self._waiting_since, self._has_replied = None, False


class HealthMonitor:
    """Asks agents elsewhere behind what runs; the one on this node is looked at directly."""

    def __init__(self, config: Config):
        self._config = config
        self._local_node: str = ray.get_runtime_context().get_node_id()
        self._local_agent = NodeAgent(config)
        self._remote_agents: dict[str, _RemoteAgent] = {}

    def start_agents(self, nodes: Iterable[str]) -> None:
        """There will be ranks on these nodes: agents come up beside them, and no slower."""
        new = set(nodes) - {self._local_node, *self._remote_agents}
        known = get_raylet_addresses() if new else {}
        for node in new:
            self._remote_agents[node] = _RemoteAgent(self._config, node, known.get(node))

    def begin_generation(self, ranks: Iterable[dict[str, Any]]) -> None:
        """The ranks of a generation, each with its rank, node, pid and pulse (the path of its heartbeat)."""
        by_node: dict[str, dict[int, tuple[int, str]]] = {self._local_node: {}}
        for info in ranks:
            by_node.setdefault(info["node"], {})[info["rank"]] = info["pid"], info["pulse"]
        for node in self._remote_agents.keys() - by_node.keys():
            self._remote_agents[node].watch({})
        self._local_agent.watch(by_node.pop(self._local_node))
        self.start_agents(by_node)
        for node, pulses in by_node.items():
            self._remote_agents[node].watch(pulses)

    def find_suspects(self) -> list[Suspect]:
        """Who shows no life, as far as agents have said so."""
        self._poll_agents()
        return [one for seen in self._collect_node_health() for one in seen.suspects]

    def collect_health(self) -> dict[int, WorkerHealth]:
        """What was seen last of every rank."""
        return {rank: signs for seen in self._collect_node_health() for rank, signs in seen.workers.items()}

    def _poll_agents(self) -> None:
        """Take what agents have said, and ask again."""
        owed = {agent.pending_reply: agent for agent in self._remote_agents.values() if agent.pending_reply is not None}
        ready, _ = ray.wait(list(owed), num_returns=len(owed), timeout=0) if owed else ([], [])
        for answer in ready:
            owed[answer].receive_reply()
        every_s = max(_POLL_INTERVAL_S, len(self._remote_agents) / _MAX_POLLS_PER_S)
        for agent in self._remote_agents.values():
            agent.poll(every_s)

    def _collect_node_health(self) -> list[NodeHealth]:
        return [self._local_agent.look(), *(agent.last_health for agent in self._remote_agents.values())]

    def find_lost_nodes(self, *, rank_failed: bool) -> list[str]:
        """Nodes that do not answer any more. `broken`: whether the end of a rank has been heard of."""
        self._poll_agents()
        silent_s = {node: agent.measure_silence_s() for node, agent in self._remote_agents.items()}
        refusing = [node for node, agent in self._remote_agents.items() if rank_failed and agent.is_raylet_down()]
        return find_lost_nodes(silent_s, has_lost_ranks=rank_failed, dead_nodes=refusing)

    def remove_node(self, node: str) -> None:
        """A node is given up on, and its agent with it."""
        agent = self._remote_agents.pop(node, None)
        if agent is not None:
            ray.kill(agent.actor, no_restart=True)

    def compute_settle_timeout_s(self) -> float:
        """How long ranks may take to end after one of them has: until their next collective, which breaks."""
        return max(
            _MIN_SETTLE_S,
            _SETTLE_STEPS * max((one.step_s or 0.0 for one in self.collect_health().values()), default=0.0),
        )

    def collect_stacks(self) -> dict[int, str]:
        """What the threads of all ranks are at."""
        asked = [agent.actor.stacks.remote() for agent in self._remote_agents.values()]
        found = self._local_agent.stacks()
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=_STACKS_TIMEOUT_S) if asked else ([], [])
        for answer in ready:
            found |= _get_stacks(answer)
        return found

    def kill_rank(self, node: str, rank: int) -> None:
        """End a rank by its pid."""
        if node == self._local_node:
            self._local_agent.kill(rank)
        elif node in self._remote_agents:
            self._remote_agents[node].actor.kill.remote(rank)

    def close(self) -> None:
        """End the agents."""
        self._local_agent.close()
        for node in list(self._remote_agents):
            self.remove_node(node)


def _get_stacks(answer: Any) -> dict[int, str]:
    """What an agent said; nothing where it is gone with its node, which is heard otherwise."""
    try:
        found: dict[int, str] = ray.get(answer)
    except RayError:
        return {}
    return found
