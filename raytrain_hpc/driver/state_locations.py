"""Where parts of the training state are in memory: in workers, or held by the agents of nodes for lost workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from raytrain_hpc.driver.corruption_attribution import REPLICAS_DIFFER
from raytrain_hpc.driver.health_monitor import HealthMonitor
from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.audit_verdict import CORRUPT, FAULTY_DEVICE, SUSPECTED
from raytrain_hpc.elastic.state_partition import (
    StatePart,
    assign_missing_parts,
    compute_state_partition,
    find_complete_generation,
    find_newest_complete_step,
)
from raytrain_hpc.errors import WorkerFailedError
from raytrain_hpc.runtime.control_channel import GenerationOutcome
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.snapshot.shared_file import SnapshotHandles

_CORRUPTION_KINDS = frozenset((CORRUPT, FAULTY_DEVICE, SUSPECTED, REPLICAS_DIFFER))


class StateLocations:
    """State parts of a run's generations, and the shared memory of those that a node holds."""

    def __init__(self, health: HealthMonitor):
        self._health = health
        self._partitions: dict[int, list[int]] = {}  # generation -> part of the state of each rank
        self._past_ranks: dict[tuple[int, int], int] = {}  # (generation, worker id) -> rank
        self._verified_steps: dict[int, int | None] = {}  # worker id -> the verified step that it holds
        # By node id, from a failure until the next generation begins.
        self._held: dict[str, dict[StatePart, SnapshotHandles]] = {}
        self._last_distrusted = 0  # what nodes hold of this generation and earlier ones is not restored

    def begin_generation(self, spec: WorkerSpec, workers: Sequence[Worker]) -> None:
        """Note which worker holds which part in a generation. `workers`: in rank order."""
        self._partitions[spec.generation] = compute_state_partition(spec.layout)
        self._past_ranks |= {(spec.generation, worker.worker_id): rank for rank, worker in enumerate(workers)}

    def list_states(self, worker: Worker, outcome: GenerationOutcome) -> Iterator[StatePart]:
        """Yield the states in a worker's memory, its own and replicas. They can be those of an earlier generation."""
        self._verified_steps[worker.worker_id] = outcome.verified_step
        generation = outcome.snapshot_generation
        past_rank = self._past_ranks.get((generation, worker.worker_id))
        if past_rank is not None:
            for owner, steps in {past_rank: outcome.steps, **outcome.replica_steps}.items():
                yield from self._make_parts(generation, owner, steps)

    def collect_held(self, survivors: Sequence[Worker], failures: Collection[WorkerFailedError]) -> None:
        """Ask the agents of all nodes what they hold. Call after a failure.

        They are not asked if the survivors have all of the newest step that any of them has. If replicas differ, what
        nodes hold can be what differs: neither this call nor a later one uses it; nor if a spare disagrees with a rank.
        Of what survivors hold, only verified state is left then: one that ended for another reason has not discarded
        the rest itself.
        """
        self._held = {}
        if any(failure.kind in _CORRUPTION_KINDS or failure.trusted_step is not None for failure in failures):
            self._last_distrusted = max(self._partitions, default=0)
            for worker in survivors:
                verified_step = self._verified_steps.get(worker.worker_id)
                worker.states = tuple(part for part in worker.states if part.step == verified_step)
        states = [worker.states for worker in survivors]
        newest = max((part.step for parts in states for part in parts), default=None)
        if newest is not None and find_newest_complete_step(states) == newest:
            return
        for node_id, snapshots in self._health.collect_snapshots().items():
            for held in snapshots:
                if held.generation > self._last_distrusted:
                    for part in self._make_parts(held.generation, held.rank, (held.step,)):
                        self._held.setdefault(node_id, {}).setdefault(part, held.handles)

    def forget_held(self) -> None:
        """Forget what the agents hold, because it is not to be restored or outdated."""
        self._held = {}

    def list_held(self, workers: Sequence[Worker]) -> dict[str, tuple[StatePart, ...]]:
        """Return the parts that nodes hold and none of these workers does, by node id."""
        in_workers = {part for worker in workers for part in worker.states}
        return {node_id: tuple(part for part in held if part not in in_workers) for node_id, held in self._held.items()}

    def list_held_parts(self) -> tuple[StatePart, ...]:
        """Return all parts that nodes hold."""
        return tuple(part for held in self._held.values() for part in held)

    def plan_restore(self, spec: WorkerSpec, members: Sequence[Worker]) -> WorkerSpec:
        """Return the spec with the generation whose state is restored, and the snapshots that each rank opens."""
        if spec.memory_step is None:
            return spec
        nodes, held = [worker.info["node_id"] for worker in members], self.list_held(members)
        own, nearby = [worker.states for worker in members], [held.get(node, ()) for node in nodes]
        generation = find_complete_generation(spec.memory_step, [*own, *nearby])
        if generation is None:
            return spec
        assigned = assign_missing_parts(generation, spec.memory_step, own, nearby)
        handles = {
            rank: tuple(self._held[nodes[rank]][part] for part in parts) for rank, parts in enumerate(assigned) if parts
        }
        return replace(spec, memory_generation=generation, held_snapshots=handles)

    def _make_parts(self, generation: int, rank: int, steps: Sequence[int]) -> Iterator[StatePart]:
        partition = self._partitions.get(generation)
        if partition is not None:
            for step in steps:
                yield StatePart(generation, partition[rank], max(partition) + 1, step)
