"""Health of the workers on all nodes, read from one agent per node."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.held_memory import HeldSnapshot
from raytrain_hpc.driver.node_agent import NodeAgent, NodeHealth, WatchedProcess, WatchedRanks
from raytrain_hpc.driver.ray_topology import get_raylet_addresses
from raytrain_hpc.elastic.death_report import DeathReport
from raytrain_hpc.elastic.watchdog import (
    Suspect,
    WorkerHealth,
    compute_timeouts,
    exclude_waiting,
    find_lost_nodes,
    is_busy,
    is_waiting_for_busy_rank,
)
from raytrain_hpc.runtime.control_channel import Record

_POLL_INTERVAL_S = 0.1  # between the reply of a remote agent and the next request
_MAX_POLLS_PER_S = 1000  # to all agents together
_RESTART_DELAY_S = 5.0  # between the death of an agent and the first request to its replacement
_STACKS_TIMEOUT_S, _MEMORY_TIMEOUT_S, _DEATHS_TIMEOUT_S = 1.0, 0.5, 0.3
_ORPHAN_TIMEOUT_S = 300.0  # long, because a driver that waits for unavailable storage polls no agent
_REPLY_DUE_S, _CONNECT_TIMEOUT_S = 0.1, 0.02  # longer than a healthy agent, or a running raylet, takes
_MIN_SETTLE_S, _SETTLE_STEPS = 10.0, 3.0

AgentActor = ray.remote(num_cpus=0, max_restarts=0)(NodeAgent)


class _RemoteAgent:
    """Handle of the agent actor on another node. Requests to it are asynchronous."""

    def __init__(self, config: Config, node: str, raylet_address: tuple[str, int] | None):
        self._config, self._node, self._raylet_address = config, node, raylet_address
        self._watched: WatchedRanks = {}
        self.last_health = NodeHealth([], {})
        self.actor: Any = None
        self._reply: Any = None
        self._waiting_since: float | None = None
        self._last_reply_time, self._has_replied = 0.0, False
        self._start_actor()

    def watch(self, ranks: WatchedRanks, memory_step: int | None) -> None:
        """Replace the ranks that the agent watches. `memory_step`: see `NodeAgent.watch`."""
        self._watched, self.last_health = ranks, NodeHealth([], {})
        # A reply to an earlier request would be about the last generation. The driver has polled no agent since then,
        # so the time between the generations is no silence.
        self._reply = self._waiting_since = None
        self.actor.watch.remote(ranks, memory_step)

    @property
    def pending_reply(self) -> Any:
        """The Ray reference of the outstanding request, or None."""
        return self._reply

    @property
    def has_replied(self) -> bool:
        """Whether the agent has replied since it was started."""
        return self._has_replied

    def receive_reply(self) -> None:
        """Store the reply to the outstanding request, which must be ready; restart the agent if it has died."""
        self._last_reply_time = time.monotonic()
        try:
            self.last_health, self._waiting_since = ray.get(self._reply), None
            self._has_replied = True
        except ActorUnavailableError:  # if this lasts, `measure_silence_s` shows it
            pass
        except RayError:
            self._start_actor()
            self.actor.watch.remote(self._watched)
            self._last_reply_time += _RESTART_DELAY_S
        self._reply = None

    def poll(self, interval_s: float) -> None:
        """Request the agent's reading if no request is outstanding and its last reply is older than `interval_s`."""
        now = time.monotonic()
        if self._reply is None and now - self._last_reply_time > interval_s:
            self._reply = self.actor.get_health.remote()
            self._waiting_since = self._waiting_since or now

    def measure_silence_s(self) -> float:
        """Return for how many seconds a reply has been outstanding; 0 until the agent has replied once."""
        return 0.0 if self._waiting_since is None or not self._has_replied else time.monotonic() - self._waiting_since

    def is_raylet_down(self) -> bool:
        """Return whether a reply is overdue and the node's raylet, without which its workers end, refuses connections.

        A machine that is up refuses at once. An unreachable machine does not answer at all, which gives False.
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
        strategy = NodeAffinitySchedulingStrategy(self._node, soft=False)
        options = AgentActor.options(scheduling_strategy=strategy)  # type: ignore[attr-defined]
        self.actor = options.remote(self._config, _ORPHAN_TIMEOUT_S)
        self._waiting_since, self._has_replied = None, False


class HealthMonitor:
    """Health of all ranks of a run.

    The agent of the driver's own node runs in this process. Agents of other nodes are actors, polled in the background.
    """

    def __init__(self, config: Config):
        self._config = config
        self._local_node: str = ray.get_runtime_context().get_node_id()
        self._local_agent = NodeAgent(config)
        self._remote_agents: dict[str, _RemoteAgent] = {}
        self._last_busy = -math.inf  # monotonic time

    def start_agents(self, nodes: Iterable[str]) -> None:
        """Start an agent on each of these nodes that has none. Call before workers are started on them."""
        new_nodes = set(nodes) - {self._local_node, *self._remote_agents}
        raylet_addresses = get_raylet_addresses() if new_nodes else {}
        for node in new_nodes:
            self._remote_agents[node] = _RemoteAgent(self._config, node, raylet_addresses.get(node))

    def begin_generation(self, ranks: Iterable[dict[str, Any]], memory_step: int | None) -> None:
        """Watch the ranks of a new generation instead of those of the last one.

        Each entry of `ranks` has the keys rank, node_id and those of WatchedProcess. `memory_step`: the step that they
        restore from memory.
        """
        by_node: dict[str, dict[int, WatchedProcess]] = {self._local_node: {}}
        for info in ranks:
            process = WatchedProcess(info["pid"], info["pulse"], info.get("pci_address", ""))
            by_node.setdefault(info["node_id"], {})[info["rank"]] = process
        for node in self._remote_agents.keys() - by_node.keys():
            self._remote_agents[node].watch({}, None)
        self._local_agent.watch(by_node.pop(self._local_node), memory_step)
        self.start_agents(by_node)
        for node, watched in by_node.items():
            self._remote_agents[node].watch(watched, memory_step)

    def find_suspects(self) -> list[Suspect]:
        """Return the ranks that the last readings of all agents report as unresponsive, and request new readings.

        Ranks that wait for one that loads data are not among them.
        """
        self._poll_agents()
        readings = self._collect_node_health()
        suspects = [suspect for node_health in readings for suspect in node_health.suspects]
        if is_waiting_for_busy_rank(suspects, [health for reading in readings for health in reading.workers.values()]):
            self._last_busy = time.monotonic()
        return exclude_waiting(suspects, time.monotonic() - self._last_busy)

    @property
    def local_node(self) -> str:
        """Ray's id of the driver's node."""
        return self._local_node

    def find_preempted_nodes(self) -> set[str]:
        """Return the nodes that their cloud has announced to reclaim, as last read by their agents."""
        preempted = {node for node, agent in self._remote_agents.items() if agent.last_health.is_preempted}
        return preempted | ({self._local_node} if self._local_agent.get_health().is_preempted else set())

    def collect_health(self) -> dict[int, WorkerHealth]:
        """Return the last known health of every rank."""
        return {
            rank: health for node_health in self._collect_node_health() for rank, health in node_health.workers.items()
        }

    def describe_device(self, rank: int) -> str:
        """Return the last known state of the GPU of a rank in one line, "" if nothing is known of it."""
        readings = self._collect_node_health()
        return next((reading.devices[rank].describe() for reading in readings if rank in reading.devices), "")

    def list_last_seen(self, reply_times: Sequence[float]) -> list[float]:
        """Return the Unix time of the last sign of life of each rank: its last reply, or beat that its agent read."""
        health = self.collect_health()
        beats = [health[rank].last_beat_unix if rank in health else 0.0 for rank in range(len(reply_times))]
        return [max(reply, beat) for reply, beat in zip(reply_times, beats, strict=True)]

    def _poll_agents(self) -> None:
        """Receive the replies that have arrived and send the next requests, without blocking."""
        agent_of_reply = {
            agent.pending_reply: agent for agent in self._remote_agents.values() if agent.pending_reply is not None
        }
        ready, _ = (
            ray.wait(list(agent_of_reply), num_returns=len(agent_of_reply), timeout=0) if agent_of_reply else ([], [])
        )
        for reply in ready:
            agent_of_reply[reply].receive_reply()
        interval_s = max(_POLL_INTERVAL_S, len(self._remote_agents) / _MAX_POLLS_PER_S)
        for agent in self._remote_agents.values():
            agent.poll(interval_s)

    def _collect_node_health(self) -> list[NodeHealth]:
        """Return the last reading of each agent."""
        return [self._local_agent.get_health(), *(agent.last_health for agent in self._remote_agents.values())]

    def find_lost_nodes(self, *, rank_failed: bool) -> list[str]:
        """Return the nodes whose agents have stopped replying.

        `rank_failed`: a rank is suspected or has ended. A node is then declared lost after a shorter silence.
        """
        self._poll_agents()
        silent_s = {node: agent.measure_silence_s() for node, agent in self._remote_agents.items()}
        dead_nodes = [node for node, agent in self._remote_agents.items() if rank_failed and agent.is_raylet_down()]
        return find_lost_nodes(silent_s, has_lost_ranks=rank_failed, dead_nodes=dead_nodes)

    def remove_node(self, node: str) -> None:
        """Kill the agent of a lost node and stop watching it."""
        agent = self._remote_agents.pop(node, None)
        if agent is not None:
            ray.kill(agent.actor, no_restart=True)

    def compute_settle_timeout_s(self) -> float:
        """Return how long the other ranks may take to end after one has failed.

        They end at their next collective, so that this is a multiple of the longest step time.
        """
        return max(
            _MIN_SETTLE_S,
            _SETTLE_STEPS * max((health.step_s or 0.0 for health in self.collect_health().values()), default=0.0),
        )

    def find_busy_ranks(self) -> set[int]:
        """Return the ranks that can end an aborted generation later only, by the last readings of all agents."""
        health = self.collect_health()
        timeouts = compute_timeouts(self._config, [of_rank.step_s or 0.0 for of_rank in health.values()])
        return {rank for rank, of_rank in health.items() if is_busy(of_rank, timeouts)}

    def collect_stacks(self) -> dict[int, str]:
        """Return the thread stacks of every rank whose agent replies within a second."""
        return self._collect_by_rank("collect_stacks", _STACKS_TIMEOUT_S)

    def explain_deaths(self) -> dict[int, DeathReport]:
        """Return why ranks have died, of those whose agent knows it and replies within 0.3 s."""
        return self._collect_by_rank("explain_deaths", _DEATHS_TIMEOUT_S)

    def collect_snapshots(self) -> dict[str, list[HeldSnapshot]]:
        """Return the complete snapshots that agents hold, by node id, of those that reply within half a second."""
        replies = self._ask_agents(lambda actor: actor.list_snapshots.remote(), _MEMORY_TIMEOUT_S)
        return {self._local_node: self._local_agent.list_snapshots(), **replies}

    def recall_metrics(self, after_step: int) -> list[Record]:
        """Return the metrics of the steps after `after_step` that rank 0 has kept on its node, in order."""
        replies = self._ask_agents(lambda actor: actor.recall_metrics.remote(after_step), _MEMORY_TIMEOUT_S)
        numbered = [pair for of_node in replies.values() for pair in of_node]
        numbered += self._local_agent.recall_metrics(after_step)
        # Later generations run steps again; a later entry of a step replaces an earlier one.
        by_step = {metrics["step"]: metrics for _, metrics in sorted(numbered, key=lambda pair: pair[0])}
        return [by_step[step] for step in sorted(by_step)]

    def _collect_by_rank(self, method: str, timeout_s: float) -> dict[int, Any]:
        """Call a method of all agents that returns something by rank, and merge what arrives within `timeout_s`."""
        replies = self._ask_agents(lambda actor: getattr(actor, method).remote(), timeout_s)
        merged: dict[int, Any] = getattr(self._local_agent, method)()
        for of_node in replies.values():
            merged |= of_node
        return merged

    def _ask_agents(self, ask: Callable[[Any], Any], timeout_s: float) -> dict[str, Any]:
        """Call a method of the agents of other nodes, and return the replies within `timeout_s` by node id.

        Agents that are still starting are not waited for: they have nothing to report.
        """
        node_of_reply = {ask(agent.actor): node for node, agent in self._remote_agents.items() if agent.has_replied}
        pending = list(node_of_reply)
        ready, _ = ray.wait(pending, num_returns=len(pending), timeout=timeout_s) if pending else ([], [])
        replies = {}
        for reply in ready:
            with contextlib.suppress(RayError):  # the agent has died with its node
                replies[node_of_reply[reply]] = ray.get(reply)
        return replies

    def kill_rank(self, node: str, rank: int) -> None:
        """Kill the process of a rank through the agent of its node."""
        if node == self._local_node:
            self._local_agent.kill(rank)
        elif node in self._remote_agents:
            self._remote_agents[node].actor.kill.remote(rank)

    def close(self) -> None:
        """Stop all agents."""
        self._local_agent.close()
        for node in list(self._remote_agents):
            self.remove_node(node)
