"""Schedule of audits by spares: which microbatches idle spares compute again, outside the time of a step.

Spares form a unit as the ranks do that compute microbatches together in training: a model replica, or several if these
share experts, or if sharded weights have other bits without shards. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from raytrain_hpc.config.field import AUTO, Auto
from raytrain_hpc.config.schema import Config
from raytrain_hpc.elastic.audit_schedule import MAX_AUTO_COST, AuditSchedule, count_ranks_per_unit
from raytrain_hpc.elastic.shard_holders import ShardHolders
from raytrain_hpc.planner.layout import Layout

_RELATIVE_COST = 0.4  # of a sample, over a step: a copy of the weights, and hashes of the gradients of a microbatch


@dataclass(frozen=True)
class SpareAudit:
    """What spares compute again of the step after `step` committed ones.

    `layout`: of the spares. `ranks`: of the unit whose hashes are compared with theirs, in the order of the ranks of
    `layout`. `microbatches`: by data-parallel rank of the unit. `sources`: ranks that provide the weights.
    """

    step: int
    layout: Layout
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class SpareAuditSchedule:
    """The audits by spares in one layout.

    `schedule`: with the interval between them, 0: none. `by_ranks`: steps that ranks audit; a sample that is due in one
    is taken in the next step. `unit`: the layout of spares.
    """

    schedule: AuditSchedule
    by_ranks: AuditSchedule
    layout: Layout
    unit: Layout

    def is_due(self, step: int) -> bool:
        """Return whether spares may compute microbatches of the step after `step` committed ones again."""
        is_delayed = step > 0 and self.schedule.is_due(step - 1) and self.by_ranks.is_due(step - 1)
        return (self.schedule.is_due(step) or is_delayed) and not self.by_ranks.is_due(step)

    def plan(self, step: int) -> SpareAudit:
        """Return what spares compute again, the same on all ranks: units take turns, and microbatches are random."""
        audit, firsts = self.schedule.plan(step), self._first_dp_ranks
        first = firsts[audit.number % len(firsts)]
        microbatches = audit.microbatches[first : first + self.unit.dp_size]
        return SpareAudit(step, self.unit, self._list_ranks(first), microbatches, self._list_sources(first))

    @cached_property
    def _first_dp_ranks(self) -> list[int]:
        """The first data-parallel rank of each unit. Two overlap if their size does not divide that of the layout."""
        num_shards, num_unit_shards = self.layout.dp_shard, self.unit.dp_shard
        starts = range(0, num_shards, num_unit_shards)
        replicates = range(0, self.layout.dp_replicate, self.unit.dp_replicate)
        return [r * num_shards + min(start, num_shards - num_unit_shards) for r in replicates for start in starts]

    def _list_ranks(self, first: int) -> tuple[int, ...]:
        """Return the ranks of a unit. `first`: its first data-parallel rank."""
        ranks = list[int]()
        for rank in range(self.unit.world_size):
            replicate, shard = divmod(first + self.unit.get_dp_rank(rank), self.layout.dp_shard)
            place = {**self.unit.get_coordinates(rank), "dp_replicate": replicate, "dp_shard": shard}
            ranks.append(self.layout.get_rank(place))
        return tuple(ranks)

    def _list_sources(self, first: int) -> tuple[int, ...]:
        """Return ranks that together hold all weights, of another replica than a unit if there is one."""
        replicate = (first // self.layout.dp_shard + 1) % self.layout.dp_replicate
        copies = {"dense": replicate * self.layout.cp, "experts": 0}
        return tuple(
            rank
            for rank in range(self.layout.world_size)
            if any(self._holders.get_place(kind, rank).copy == copies[kind] for kind in self._holders.kinds)
        )

    @cached_property
    def _holders(self) -> ShardHolders:
        return ShardHolders(self.layout)


def get_unit_layout(config: Config, layout: Layout) -> Layout:
    """Return the layout of the fewest spares that compute a microbatch with the bits that it has in `layout`."""
    dp_size = count_ranks_per_unit(layout)
    num_shards = max(min(dp_size, layout.dp_shard), _count_shards_of_same_bits(config, layout.dp_shard))
    return replace(layout, dp_replicate=max(1, dp_size // layout.dp_shard), dp_shard=num_shards)


def _count_shards_of_same_bits(config: Config, num_shards: int) -> int:
    """Return over how few ranks weights can be sharded without other bits of the passes."""
    is_split = config.parallel.tile_mib > 0 and config.train.compile is True
    return 2 if num_shards > 1 and is_split else 1  # gathers of tiles split the compiled code


def choose_spare_interval(config: Config) -> int:
    """Return the steps between two audits by spares; 0 without spares, or if ranks audit no step or every one.

    auto: as few as cost at most 1 % of the time.
    """
    setting: int | Auto = config.fault.spare_audit_interval
    if config.fault.audit_interval in (0, 1) or not config.cluster.spares:
        return 0
    return ceil(_RELATIVE_COST / MAX_AUTO_COST) if setting == AUTO else int(setting)


def list_more_audits(start_step: int, disputed_step: int | None) -> frozenset[int]:
    """Return after how many committed steps ranks audit a step because of a dispute, from `start_step` on.

    The first step, or the second one if the first is disputed: a step that ranks audit is not sampled, and the sample
    tells who was wrong.
    """
    if disputed_step is None:
        return frozenset()
    return frozenset([start_step + 1 if start_step == disputed_step else start_step])


def build_spare_schedule(config: Config, layout: Layout, by_ranks: AuditSchedule) -> SpareAuditSchedule:
    """Return the audits by spares. `by_ranks`: those by ranks."""
    schedule = replace(by_ranks, interval=choose_spare_interval(config), more_steps=frozenset())
    return SpareAuditSchedule(schedule, by_ranks, layout, get_unit_layout(config, layout))
