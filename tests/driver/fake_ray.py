"""A fake Ray whose actors answer as workers and agents do, at the times of a scenario."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ray import cloudpickle
from ray.exceptions import ActorDiedError, GetTimeoutError

from raytrain_hpc.driver import (
    health_monitor,
    node_drain,
    ray_backend,
    ray_topology,
    record_poller,
    slot_reservations,
    spare_health,
    spare_warmup,
    worker_group,
)
from raytrain_hpc.driver.node_agent import NodeHealth, WatchedRanks
from raytrain_hpc.elastic.watchdog import WorkerHealth
from raytrain_hpc.nvml import GpuHealth
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.runtime.control_channel import GenerationOutcome
from raytrain_hpc.runtime.phase_durations import PhaseDurations
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_POLL_S = 0.001


@dataclass(frozen=True)
class Scenario:
    """Seconds until the first step of a generation and per step; the rank that is lost, and after which step."""

    build_s: float = 0.5
    step_s: float = 0.25
    lost_after_step: int = 10
    lost_rank: int = 5
    abort_s: float = 0.1  # from the loss until the other ranks have ended


class FakeRef:
    """An object reference, resolved now or later."""

    __slots__ = ("error", "ready", "value")

    def __init__(self) -> None:
        self.ready, self.value, self.error = False, None, None

    def resolve(self, value: Any = None, error: BaseException | None = None) -> FakeRef:
        self.ready, self.value, self.error = True, value, error
        return self


class FakeActor:
    """An actor: `actor.method.remote(...)` calls the method of `target` and counts the message."""

    def __init__(self, fake_ray: FakeRay, target: Any):
        self._fake_ray, self.target = fake_ray, target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._fake_ray.call(self.target, name, arguments))


@dataclass
class FakeWorker:
    """A worker: its node, its pending records, and its unfinished run call."""

    node: str
    pid: int
    records: list[dict[str, Any]] = field(default_factory=list)
    running: FakeRef | None = None
    outcome: GenerationOutcome = field(default_factory=lambda: GenerationOutcome("done"))

    def describe(self, config: Any, spec: Any) -> dict[str, Any]:
        now = time.time()
        where = {"node_id": self.node, "host": self.node, "rack": "", "address": "10.0.0.1", "pid": self.pid}
        where |= {"pulse": "", "cpu": "c", "versions": {}, "pci_address": f"0000:{self.pid % 8:02x}:00.0"}
        return where | {"device": "NVIDIA H100 80GB HBM3", "memory_gib": 79.1, "began": now, "imported": now}

    def drain(self) -> list[dict[str, Any]]:
        taken, self.records = self.records, []
        return taken

    def recent_calls(self) -> list[Any]:
        return []

    def recall(self, after: int) -> list[dict[str, Any]]:
        return []

    def do_nothing(self, *arguments: Any) -> None:
        pass

    warm_up = cancel_warmup = hold = abort = request = do_nothing


@dataclass
class FakeAgent:
    """A node's agent that reports all its ranks as healthy."""

    fake_ray: FakeRay
    ranks: Sequence[int] = ()
    devices: Mapping[int, GpuHealth] = field(default_factory=dict)

    def watch(self, ranks: WatchedRanks, memory_step: int | None) -> None:
        self.ranks = list(ranks)
        self.devices = {rank: GpuHealth(temperature_c=60) for rank, watched in ranks.items() if watched.pci_address}

    def list_snapshots(self) -> list[Any]:
        return []

    def recall_metrics(self, after_step: int) -> list[Any]:
        return []

    def get_health(self) -> NodeHealth:
        step = self.fake_ray.step
        workers = {r: WorkerHealth(r, True, False, 0.0, 0.0, "training", step, 0.25) for r in self.ranks}
        return NodeHealth([], workers, devices=self.devices)

    def explain_deaths(self) -> dict[int, Any]:
        return {}

    def collect_stacks(self) -> dict[int, str]:
        return dict.fromkeys(self.ranks, "")

    def kill(self, rank: int) -> None:
        pass


class FakeRay:
    """A replacement for Ray in the driver's modules. Time is real; events become due while the driver waits."""

    def __init__(self, cluster: Topology, scenario: Scenario):
        self._cluster, self._scenario = cluster, scenario
        self._pids, self._patches = 1000, ExitStack()
        self._running: dict[int, tuple[FakeWorker, WorkerSpec]] = {}  # rank -> worker and spec, of this generation
        self._due: list[tuple[float, Callable[[], None]]] = []
        self.step, self.lost_at = 0, 0.0
        self.launch_times: list[float] = []
        self.node_of_rank: list[dict[int, str]] = []  # of each generation
        self.messages: Counter[str] = Counter()
        self.sent_bytes, self.fake_cpu_s = 0, 0.0
        self._steady: tuple[float, int] | None = None
        self.steady_s, self.steady_messages = 0.0, 0

    def __enter__(self) -> FakeRay:
        context = SimpleNamespace(get_node_id=lambda: "driver")
        ray = SimpleNamespace(get=self.get, wait=self.wait, kill=self.kill, put=self.put, nodes=list)
        ray.get_runtime_context = lambda: context
        self._patches.enter_context(mock.patch.object(node_drain, "get_draining_nodes", frozenset))
        spares = (spare_health, spare_warmup)
        for module in (worker_group, ray_topology, record_poller, health_monitor, ray_backend, *spares):
            self._patches.enter_context(mock.patch.object(module, "ray", ray))
        replaced = {
            "placement_group": self._group,
            "placement_group_table": lambda group: {"bundles_to_node_id": dict(enumerate(group.nodes))},
            "remove_placement_group": lambda group: None,
            "PlacementGroupSchedulingStrategy": SimpleNamespace,
        }
        self._patches.enter_context(mock.patch.multiple(slot_reservations, **replaced))
        agent_class = SimpleNamespace(
            options=lambda **named: SimpleNamespace(remote=lambda *_: FakeActor(self, FakeAgent(self)))
        )
        self._patches.enter_context(mock.patch.object(health_monitor, "AgentActor", agent_class))
        self._patches.enter_context(mock.patch.object(health_monitor, "NodeAffinitySchedulingStrategy", mock.Mock()))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    @property
    def workers(self) -> Any:
        """The actor class from which `driver.worker_group` starts workers."""
        return SimpleNamespace(options=self._options)

    def _options(self, *, scheduling_strategy: Any, **named: Any) -> Any:
        group, bundle = (
            scheduling_strategy.placement_group,
            scheduling_strategy.placement_group_bundle_index,
        )

        def start(*arguments: Any) -> FakeActor:
            self._pids += 1
            return FakeActor(self, FakeWorker(group.nodes[bundle], self._pids))

        return SimpleNamespace(remote=start)

    def _group(self, bundles: Sequence[dict[str, int]], **named: Any) -> Any:
        named_nodes = [labels["ray.io/node-id"] for labels in named.get("bundle_label_selector") or []]
        nodes = named_nodes or [node.id for node in self._cluster.nodes[: len(bundles)]]
        return SimpleNamespace(nodes=nodes, wait=lambda timeout: True)

    def call(self, target: Any, name: str, arguments: tuple[Any, ...]) -> FakeRef:
        """Send one message to an actor, serialized as Ray does it."""
        self.messages[name] += 1
        payload = [argument for argument in arguments if not isinstance(argument, FakeRef)]
        self.sent_bytes += len(cloudpickle.dumps(payload))
        if name != "run":
            return FakeRef().resolve(getattr(target, name)(*arguments))
        spec, rank = arguments[0].value, arguments[1]
        target.running = FakeRef()
        self._running[rank] = target, spec
        if len(self._running) == spec.layout.world_size:
            self._begin(spec)
        return target.running

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [self.get(ref, timeout) for ref in references]
        ready, _ = self.wait([references], timeout=timeout)
        if not ready:
            raise GetTimeoutError("no answer")
        if references.error is not None:
            raise references.error
        return references.value

    def put(self, value: Any) -> FakeRef:
        self.sent_bytes += len(cloudpickle.dumps(value))
        return FakeRef().resolve(value)

    def wait(
        self, references: Sequence[FakeRef], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[FakeRef], list[FakeRef]]:
        """Return at most `num_returns` references that are ready, and all others, as Ray does."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._run_due_events()
            ready = [ref for ref in references if ref.ready][:num_returns]
            if len(ready) >= num_returns or (deadline is not None and time.monotonic() >= deadline):
                returned = set(map(id, ready))
                return ready, [ref for ref in references if id(ref) not in returned]
            time.sleep(_POLL_S)

    def kill(self, actor: FakeActor, *, no_restart: bool) -> None:
        pass

    def _run_due_events(self) -> None:
        """Run the events that are due. Their CPU time is not counted as the driver's."""
        start = time.process_time()
        now = time.monotonic()
        due, self._due = (
            [entry for entry in self._due if entry[0] <= now],
            [entry for entry in self._due if entry[0] > now],
        )
        for _, action in due:
            action()
        self.fake_cpu_s += time.process_time() - start

    def _begin(self, spec: WorkerSpec) -> None:
        now, scenario = time.monotonic(), self._scenario
        self.launch_times.append(now)
        self.node_of_rank.append({rank: target.node for rank, (target, _) in self._running.items()})
        self._due.append((now + scenario.build_s, self._ready))
        for step in range(spec.start_step + 1, spec.end_step + 1):
            due = now + scenario.build_s + (step - spec.start_step) * scenario.step_s
            self._due.append((due, lambda step=step: self._commit(spec, step)))
            if step == scenario.lost_after_step and len(self.launch_times) == 1:
                self._due.append((due + scenario.step_s / 2, lambda step=step: self._lose_rank(spec, step)))
                return
        self._due.append((due + scenario.step_s, lambda: self._end(spec, "done", spec.end_step)))

    def _ready(self) -> None:
        self._steady = time.monotonic(), self.messages.total()
        for rank, (target, _) in self._running.items():
            target.records.append(PhaseDurations().to_ready_record(rank))

    def _commit(self, spec: WorkerSpec, step: int) -> None:
        self.step, scenario = step, self._scenario
        tokens = spec.config.train.global_batch_size * spec.config.train.seq_len
        metrics = dict.fromkeys(("train/lr", "train/grad_norm", "time/data_s", "time/checkpoint_s"), 0.0)
        metrics |= {"step": step, "train/loss": 1.0 / step, "train/tokens": step * tokens, "time/unix": time.time()}
        metrics |= {
            "time/step_s": scenario.step_s,
            "memory/peak_gib": 1.0,
            "elastic/world_size": spec.layout.world_size,
        }
        metrics |= {"throughput/tokens_per_sec": tokens / scenario.step_s, "elastic/generation": spec.generation}
        metrics["throughput/tokens_per_sec_per_device"] = tokens / scenario.step_s / spec.layout.world_size
        self._running[0][0].records.append({"type": "step", "metrics": metrics})

    def _lose_rank(self, spec: WorkerSpec, step: int) -> None:
        """Lose a rank; the others fail in their next collective and keep their states."""
        self.lost_at = time.monotonic()
        self._count_steady_messages()
        worker = self._running.pop(self._scenario.lost_rank)[0]
        assert worker.running is not None
        worker.running.resolve(error=ActorDiedError())
        reason = "RuntimeError: [gloo] Connection closed by peer"
        self._due.append((self.lost_at + self._scenario.abort_s, lambda: self._end(spec, "broken", step, reason)))

    def _end(self, spec: WorkerSpec, outcome: Any, step: int, reason: str = "") -> None:
        if outcome == "done":
            self._count_steady_messages()
        copies: dict[int, dict[int, tuple[int, ...]]] = {}
        for source, holder in spec.replication_pairs:
            copies.setdefault(holder, {})[source] = (step - 1, step)
        for rank, (target, _) in self._running.items():
            assert target.running is not None
            states = {
                "steps": (step - 1, step),
                "replica_steps": copies.get(rank, {}),
                "snapshot_generation": spec.generation,
            }
            target.running.resolve(GenerationOutcome(outcome, reason, **states))
        self._running = {}

    def _count_steady_messages(self) -> None:
        """Count the messages between the start and the end of a generation."""
        if self._steady is not None:
            start, count = self._steady
            self.steady_s += time.monotonic() - start
            self.steady_messages += self.messages.total() - count
            self._steady = None
