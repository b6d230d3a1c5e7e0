"""A Ray whose actors are played: they answer as workers and agents do, and take no time but what the play says."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError

from raytrain_hpc.driver import health_monitor, node_drain, ray_backend, ray_topology, record_poller, worker_group
from raytrain_hpc.driver.node_agent import NodeHealth
from raytrain_hpc.elastic.watchdog import WorkerHealth
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.control_channel import GenerationOutcome
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_DOZE_S = 0.001


@dataclass(frozen=True)
class Play:
    """What happens: seconds until a generation's first step, and of each; which rank is lost, after which step."""

    building_s: float = 0.5
    step_s: float = 0.25
    lost_after: int = 10
    lost: int = 5
    breaking_s: float = 0.1  # from then until the others have left


class Reference:
    """An answer, now or later."""

    __slots__ = ("error", "ready", "value")

    def __init__(self) -> None:
        self.ready, self.value, self.error = False, None, None

    def answer(self, value: Any = None, error: BaseException | None = None) -> Reference:
        self.ready, self.value, self.error = True, value, error
        return self


class Actor:
    """`actor.method.remote(...)` calls the method of whoever plays it, and counts."""

    def __init__(self, stage: Stage, player: Any):
        self._stage, self.player = stage, player

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._stage.call(self.player, name, arguments))


@dataclass
class Part:
    """A worker: where it is, what it has to say, and the run call that it has not answered."""

    node: str
    pid: int
    records: list[dict[str, Any]] = field(default_factory=list)
    running: Reference | None = None
    held: GenerationOutcome = field(default_factory=lambda: GenerationOutcome("done"))

    def describe(self, config: Any, spec: Any) -> dict[str, Any]:
        now = time.time()
        where = {"node": self.node, "rack": "", "address": "10.0.0.1", "host": self.node, "pid": self.pid, "pulse": ""}
        return where | {"device": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "began": now, "imported": now}

    def drain(self) -> list[dict[str, Any]]:
        taken, self.records = self.records, []
        return taken

    def calls(self) -> list[Any]:
        return []

    def recall(self, after: int) -> list[dict[str, Any]]:
        return []

    def nothing(self, *arguments: Any) -> None:
        pass

    rehearse = abort = request_pause = request_stop = nothing


@dataclass
class Watcher:
    """A node's agent: everybody it watches is well."""

    stage: Stage
    ranks: Sequence[int] = ()

    def watch(self, pulses: dict[int, Any]) -> None:
        self.ranks = list(pulses)

    def look(self) -> NodeHealth:
        step = self.stage.step
        return NodeHealth([], {r: WorkerHealth(r, True, False, 0.0, 0.0, "training", step, 0.25) for r in self.ranks})

    def stacks(self) -> dict[int, str]:
        return dict.fromkeys(self.ranks, "")

    def kill(self, rank: int) -> None:
        pass


class Stage:
    """In place of Ray, for the rooms of the driver. Time is real; whoever waits lets the play go on."""

    def __init__(self, cluster: Topology, play: Play):
        self._cluster, self._play = cluster, play
        self._pids, self._patches = 1000, ExitStack()
        self._cast: dict[int, tuple[Part, WorkerSpec]] = {}  # of this generation, by rank
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.step, self.struck = 0, 0.0
        self.launched: list[float] = []
        self.placed: list[dict[int, str]] = []  # rank -> node, of each generation
        self.messages: Counter[str] = Counter()
        self.sent_bytes, self.own_cpu_s = 0, 0.0
        self._steady: tuple[float, int] | None = None
        self.steady_s, self.steady_messages = 0.0, 0

    def __enter__(self) -> Stage:
        context = SimpleNamespace(get_node_id=lambda: "driver")
        ray = SimpleNamespace(get=self.get, wait=self.wait, kill=self.kill, put=self.put, nodes=list)
        ray.get_runtime_context = lambda: context
        state = SimpleNamespace(state=SimpleNamespace(get_draining_nodes=dict))
        ray._private = SimpleNamespace(state=state)
        for room in (worker_group, node_drain, ray_topology, record_poller, health_monitor, ray_backend):
            self._patches.enter_context(mock.patch.object(room, "ray", ray))
        replaced = {
            "placement_group": self._group,
            "placement_group_table": lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))},
            "remove_placement_group": lambda group: None,
            "PlacementGroupSchedulingStrategy": SimpleNamespace,
        }
        self._patches.enter_context(mock.patch.multiple(worker_group, **replaced))
        agents = SimpleNamespace(options=lambda **named: SimpleNamespace(remote=lambda *_: Actor(self, Watcher(self))))
        self._patches.enter_context(mock.patch.object(health_monitor, "AgentActor", agents))
        self._patches.enter_context(mock.patch.object(health_monitor, "NodeAffinitySchedulingStrategy", mock.Mock()))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    @property
    def workers(self) -> Any:
        """What `driver.actors` makes workers of."""
        return SimpleNamespace(options=self._options)

    def _options(self, *, scheduling_strategy: Any, **named: Any) -> Any:
        group, bundle = (
            scheduling_strategy.placement_group,
            scheduling_strategy.placement_group_bundle_index,
        )

        def start(*arguments: Any) -> Actor:
            self._pids += 1
            return Actor(self, Part(group.nodes[bundle], self._pids))

        return SimpleNamespace(remote=start)

    def _group(self, bundles: Sequence[dict[str, int]], **named: Any) -> Any:
        nodes = [node.id for node in self._cluster.nodes[: len(bundles)]]
        return SimpleNamespace(nodes=nodes, wait=lambda timeout: True)

    def call(self, player: Any, name: str, arguments: tuple[Any, ...]) -> Reference:
        """One message to an actor, packed as Ray packs it."""
        self.messages[name] += 1
        packed = [one for one in arguments if not isinstance(one, Reference)]
        self.sent_bytes += len(cloudpickle.dumps(packed))
        if name != "run":
            return Reference().answer(getattr(player, name)(*arguments))
        spec, rank = arguments[0].value, arguments[1]
        player.running = Reference()
        self._cast[rank] = player, spec
        if len(self._cast) == spec.layout.world:
            self._begin(spec)
        return player.running

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [self.get(one, timeout) for one in references]
        ready, _ = self.wait([references], timeout=timeout)
        if not ready:
            raise GetTimeoutError("no answer")
        if references.error is not None:
            raise references.error
        return references.value

    def put(self, value: Any) -> Reference:
        self.sent_bytes += len(cloudpickle.dumps(value))
        return Reference().answer(value)

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        """As Ray's: at most `num_returns` of those that are ready, and all others."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._go_on()
            ready = [one for one in references if one.ready][:num_returns]
            if len(ready) >= num_returns or (until is not None and time.monotonic() >= until):
                chosen = set(map(id, ready))
                return ready, [one for one in references if id(one) not in chosen]
            time.sleep(_DOZE_S)

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        pass

    def _go_on(self) -> None:
        """Whatever is due happens; what that costs is not the driver's."""
        began = time.process_time()
        now = time.monotonic()
        due, self._due = [one for one in self._due if one[0] <= now], [one for one in self._due if one[0] > now]
        for _, event in due:
            event()
        self.own_cpu_s += time.process_time() - began

    def _begin(self, spec: WorkerSpec) -> None:
        now, play = time.monotonic(), self._play
        self.launched.append(now)
        self.placed.append({rank: player.node for rank, (player, _) in self._cast.items()})
        self._due.append((now + play.building_s, self._ready))
        for step in range(spec.start_step + 1, spec.end_step + 1):
            at = now + play.building_s + (step - spec.start_step) * play.step_s
            self._due.append((at, lambda step=step: self._commit(spec, step)))
            if step == play.lost_after and len(self.launched) == 1:
                self._due.append((at + play.step_s / 2, lambda step=step: self._lose(spec, step)))
                return
        self._due.append((at + play.step_s, lambda: self._end(spec, "done", spec.end_step)))

    def _ready(self) -> None:
        self._steady = time.monotonic(), self.messages.total()
        for rank, (player, _) in self._cast.items():
            player.records.append({"type": "ready", "rank": rank, "model": time.time()})

    def _commit(self, spec: WorkerSpec, step: int) -> None:
        self.step, play = step, self._play
        tokens = spec.config.train.global_batch * spec.config.train.seq_len
        values = dict.fromkeys(("train/lr", "train/grad_norm", "time/data_s", "time/checkpoint_s"), 0.0)
        values |= {"step": step, "train/loss": 1.0 / step, "train/tokens": step * tokens, "time/unix": time.time()}
        values |= {"time/step_s": play.step_s, "memory/peak_gib": 1.0, "elastic/world_size": spec.layout.world_size}
        values |= {"throughput/tokens_per_sec": tokens / play.step_s, "elastic/generation": spec.generation}
        values["throughput/tokens_per_sec_per_device"] = tokens / play.step_s / spec.layout.world_size
        self._cast[0][0].records.append({"type": "step", "metrics": values})

    def _lose(self, spec: WorkerSpec, step: int) -> None:
        """One is gone; the others break in their next collective, and hold what they held."""
        self.struck = time.monotonic()
        self._count_messages()
        gone = self._cast.pop(self._play.lost)[0]
        assert gone.running is not None
        gone.running.answer(error=ActorDiedError())
        reason = "RuntimeError: [gloo] Connection closed by peer"
        self._due.append((self.struck + self._play.breaking_s, lambda: self._end(spec, "broken", step, reason)))

    def _end(self, spec: WorkerSpec, outcome: Any, step: int, reason: str = "") -> None:
        if outcome == "done":
            self._count_messages()
        copies: dict[int, dict[int, tuple[int, ...]]] = {}
        for source, buddy in spec.replication_pairs:
            copies.setdefault(buddy, {})[source] = (step - 1, step)
        for rank, (player, _) in self._cast.items():
            assert player.running is not None
            states = {"steps": (step - 1, step), "copies": copies.get(rank, {}), "taken_in": spec.generation}
            player.running.answer(GenerationOutcome(outcome, reason, **states))
        self._cast = {}

    def _count_messages(self) -> None:
        """Of the time between a generation's beginning and its end."""
        if self._steady is not None:
            began, count = self._steady
            self.steady_s += time.monotonic() - began
            self.steady_messages += self.messages.total() - count
            self._steady = None
