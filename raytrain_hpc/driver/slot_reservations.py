"""Slots of a run's workers: reserved in Ray's placement groups, and released."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_STOP_POLL_S = 0.5


@dataclass(frozen=True, eq=False)
class Slot:
    """Room for one worker in a bundle of a placement group. `node_id` is "" if Ray chose the node."""

    group: PlacementGroup
    bundle: int
    node_id: str = ""

    @property
    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """The scheduling strategy that starts an actor in this slot."""
        return PlacementGroupSchedulingStrategy(placement_group=self.group, placement_group_bundle_index=self.bundle)


class SlotReservations:
    """Reserver of slots, each of which takes one unit of `resource`, such as GPU or CPU."""

    def __init__(self, resource: str):
        self._resource = resource
        self._groups: list[PlacementGroup] = []
        self.slots: list[Slot] = []
        self.reserved_at: dict[str, float] = {}  # node id -> monotonic seconds of the last reservation on it

    def reserve_together(self, bundle_sizes: Sequence[int], nodes: Sequence[str] = ()) -> list[Slot]:
        """Reserve bundles on different nodes, all of them or none: on `nodes`, or else on those that Ray chooses.

        Returns the slots, as many per bundle as its size. They need not be free yet, see `wait_until_free`.
        """
        strategy = "STRICT_SPREAD" if len(bundle_sizes) > 1 else "PACK"
        return self._reserve(bundle_sizes, strategy, nodes)

    def reserve_each(self, bundle_sizes: Iterable[int]) -> list[Slot]:
        """Reserve each bundle on any node that has room for it, independently of the others, and return the slots."""
        return [slot for bundle_size in bundle_sizes for slot in self._reserve([bundle_size], "PACK", ())]

    def reserve_on_node(self, node_id: str, count: int) -> list[Slot]:
        """Reserve `count` slots on a node, which can be released one by one, and return them."""
        self.reserved_at[node_id] = time.monotonic()
        return [slot for _ in range(count) for slot in self._reserve([1], "PACK", [node_id], node_id)]

    def choose_surplus(self, count: int, occupied: Set[Slot]) -> set[Slot]:
        """Return the slots to release so that `count` are left, none of those that are `occupied` by members.

        Those on nodes with few members come first, so that whole nodes become free.
        """
        num_members = Counter(slot.node_id for slot in occupied)
        unused = [slot for slot in self.slots if slot not in occupied]
        unused.sort(key=lambda slot: (num_members[slot.node_id], slot.node_id))
        return set(unused[: max(0, len(self.slots) - count)])

    def wait_until_free(self, timeout_s: float, stop_event: threading.Event) -> bool:
        """Wait until all slots were free and are reserved. Returns whether they are.

        Gives up after `timeout_s` seconds, or soon after `stop_event` is set.
        """
        deadline = time.monotonic() + timeout_s
        for group in self._groups:
            while not group.wait(min(_STOP_POLL_S, max(0.0, deadline - time.monotonic()))):
                if stop_event.is_set() or time.monotonic() >= deadline:
                    return False
        return True

    def count_by_node(self) -> Counter[str]:
        """Return the number of slots of each node that `reserve_on_node` was called for."""
        return Counter(slot.node_id for slot in self.slots if slot.node_id)

    def find_nodes(self) -> set[str]:
        """Return the ids of the nodes on which slots are reserved."""
        named = {id(slot.group): slot.node_id for slot in self.slots if slot.node_id}
        groups = [group for group in self._groups if id(group) not in named]
        tables = [placement_group_table(group) for group in groups]  # type: ignore[no-untyped-call]
        return {node for table in tables for node in table["bundles_to_node_id"].values() if node} | {*named.values()}

    def release(self, slots: Iterable[Slot]) -> None:
        """Release the placement groups of these slots, which ends the actors in them."""
        groups: dict[int, Any] = {id(slot.group): slot.group for slot in slots}
        self.slots = [slot for slot in self.slots if id(slot.group) not in groups]
        self._groups = [group for group in self._groups if id(group) not in groups]
        for group in groups.values():
            remove_placement_group(group)

    def close(self) -> None:
        """Release all slots."""
        groups, self._groups, self.slots = self._groups, [], []
        for group in groups:
            remove_placement_group(group)

    def _reserve(
        self, bundle_sizes: Sequence[int], strategy: str, nodes: Sequence[str], node_id: str = ""
    ) -> list[Slot]:
        group = placement_group(
            [{self._resource: bundle_size} for bundle_size in bundle_sizes],
            strategy=strategy,
            bundle_label_selector=[{"ray.io/node-id": node} for node in nodes] or None,
        )
        self._groups.append(group)
        slots = [
            Slot(group, bundle, node_id) for bundle, bundle_size in enumerate(bundle_sizes) for _ in range(bundle_size)
        ]
        self.slots += slots
        return slots
