"""The number of workers that a run should have: of its settings, of a resize, or of the cluster that it follows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from typing import Literal

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.driver.layout_chooser import LayoutChooser
from raytrain_hpc.elastic.cluster_following import (
    FollowRules,
    NodeCapacity,
    choose_target,
    count_usable_slots,
    get_max_workers,
    is_growth_due,
    make_follow_rules,
)
from raytrain_hpc.elastic.device_allocation import UNLIMITED, Allowance
from raytrain_hpc.elastic.recovery import find_legal_size, get_min_workers
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.layout import Batching


@dataclass(frozen=True)
class _Following:
    """Rules, legal sizes and layouts of a run that follows its cluster."""

    rules: FollowRules
    find_legal_size: Callable[[int], int | None]
    chooser: LayoutChooser

    def find_size(self, limit: int, nodes: Sequence[NodeCapacity]) -> int | None:
        """Return the largest legal number of workers up to `limit`, or None."""
        return max(self.chooser.find_size(limit, nodes), self.find_legal_size(limit) or 0) or None


class WorkerTarget:
    """Target number of workers of a run. `resize` and `value` may be used by any thread, the rest by the driver's.

    The number of an explicit resize holds until the run is resized to `auto`, or ends.
    """

    def __init__(self, config: Config, print_line: Callable[[str], None]):
        self._config, self._print_line = config, print_line
        self._requested: int | None = None
        self._value, self._size = 0, 0
        self._following: _Following | None = None
        self._settled_size = 0  # growth up to it only replaces failed workers
        self._arrival_time: float | None = None  # when the first of the workers was ready that would let the run grow
        self._growth_time = -inf
        self._allowance = UNLIMITED
        self._size_to_return, self._preferred = 0, ""  # size before another run got devices, and that run
        self._largest: int | None = None  # number of workers for which the batch suffices, if it is known

    @property
    def value(self) -> int:
        """The target as last updated; 0 until the run knows how many workers it starts with."""
        return self._requested if self._requested is not None else self._value

    @property
    def wanted(self) -> int | None:
        """The number of workers that the run would have on a cluster of its own; None: as many as there is room for."""
        if self._following is None or self._requested is not None:
            return self.value
        return min((most for most in (self._following.rules.maximum, self._largest) if most is not None), default=None)

    @property
    def holder(self) -> str:
        """The run that has devices which this one would use; "" if there is none."""
        return self._allowance.holder

    def begin(
        self,
        config: Config,
        batching: Batching,
        workers: int,
        chooser: LayoutChooser | None,
    ) -> None:
        """Set the number of workers that the run starts with. Call once, when its settings are resolved.

        `chooser`: of layouts for other numbers, if the run follows its cluster; None: it does not.
        """
        self._config, self._value, self._settled_size = config, workers, workers
        if chooser is not None:
            self._following = _Following(
                make_follow_rules(config), cache(partial(find_legal_size, config, batching)), chooser
            )
            self._largest = None if chooser.has_choice else find_legal_size(config, batching, sys.maxsize)

    def choose_config(self, workers: int) -> Config | None:
        """Return the settings of the layout that the planner has chosen for this number of workers, or None."""
        return None if self._following is None else self._following.chooser.get(workers)

    def resize(self, workers: int | Literal["auto"]) -> None:
        """Request a number of workers; `auto`: follow the cluster again.

        Raises ConfigError outside cluster.min_workers and cluster.max_workers, and for `auto` if cluster.workers is
        fixed.
        """
        if workers == AUTO:
            if self._config.cluster.workers != AUTO:
                remedy = f"cluster.workers={self._config.cluster.workers} fixes the number; give a number"
                raise ConfigError("workers", workers, "resize", remedy)
            self._requested = None
            return
        minimum, maximum = get_min_workers(self._config), get_max_workers(self._config)
        if int(workers) < minimum:
            raise ConfigError("workers", workers, "resize", f"cluster.min_workers allows no fewer than {minimum}")
        if maximum is not None and int(workers) > maximum:
            raise ConfigError("workers", workers, "resize", f"cluster.max_workers allows no more than {maximum}")
        self._requested = int(workers)

    def update(self, nodes: Sequence[NodeCapacity] | None, allowance: Allowance = UNLIMITED) -> int:
        """Return the target for the nodes of the cluster that the run follows (None: it follows none).

        `allowance`: devices that the run may hold beside other runs; `nodes` have no more slots.
        """
        if self._following is None or nodes is None:
            return self.value
        rules, requested = self._following.rules, self._requested
        find_size = partial(self._following.find_size, nodes=nodes)
        room = choose_target(nodes, rules, find_size)
        target = choose_target(nodes, rules, find_size, requested, allowance.devices)
        if allowance.holder and target < self._size:
            if room != self._value:
                self._print_line(f"resize {self._size} -> {target} workers: {allowance.holder} has the devices")
            self._size_to_return, self._preferred = max(self._size_to_return, self._size), allowance.holder
        elif room != self._value:
            slots, num_nodes = count_usable_slots(nodes, rules.group_size), sum(not node.is_draining for node in nodes)
            self._print_line(
                f"cluster: room for {slots} workers on {num_nodes} nodes; {target} wanted, {self._size} train"
            )
        self._value, self._allowance = room, allowance
        self._settled_size = min(self._settled_size, target)
        return target

    def record_size(self, size: int) -> None:
        """Record the number of ranks of a generation that begins."""
        if size > max(self._settled_size, self._size_to_return) and self._size and self._requested is None:
            self._growth_time = time.monotonic()
        if self._size_to_return and size > self._size:
            self._print_line(f"resize {self._size} -> {size} workers: {self._preferred} has given devices back")
        elif 0 < self._size < size:
            self._print_line(f"workers: {size - self._size} more joined; {size} train now")
        if size >= self._size_to_return:
            self._size_to_return = 0
        self._size, self._settled_size, self._arrival_time = size, max(size, self._settled_size), None

    def may_grow(self, next_size: int) -> bool:
        """Return whether to form a generation of `next_size` ranks; 0: no larger one is possible."""
        if not next_size:
            self._arrival_time = None
            return False
        if self._following is None:
            return True
        now = time.monotonic()
        self._arrival_time = self._arrival_time or now
        return is_growth_due(
            next_size,
            self.value,
            self._following.rules,
            since_arrival_s=now - self._arrival_time,
            since_growth_s=inf if next_size <= self._size_to_return else now - self._growth_time,
            is_exempt=self._requested is not None or next_size <= self._settled_size,
        )
