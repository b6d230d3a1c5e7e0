"""Schedule of audits: when which data-parallel rank computes which microbatch of another one again. Pure functions.

A rank stands here for a data-parallel rank: all ranks of the model replica that reads its microbatches.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil

from raytrain_hpc.config.field import AUTO, Auto
from raytrain_hpc.planner.layout import Layout

MAX_AUTO_COST = 0.01  # of the time of the steps, for audit_interval=auto
PASSES_COST = 1.25  # of those of an audit, with hashes, over those of one microbatch in a step
_REDUCTION_AND_UPDATE_COST = 1.0  # of the rest of an audit, over a step; less if its passes take most of the time


@dataclass(frozen=True)
class Audit:
    """The audit of one step. `microbatches`: by owner, the logical microbatch that another rank computes again.

    `shift`: rank r computes the microbatch of rank (r + shift) modulo their number. `number`: of the audit, counted
    from the start of the run; see `shard_holders.choose_shift`.
    """

    shift: int
    microbatches: tuple[int, ...]
    number: int = 0

    def get_owner(self, rank: int, shift: int | None = None) -> int:
        """Return the rank whose microbatch `rank` computes again. `shift`: instead of that of the audit."""
        return (rank + (self.shift if shift is None else shift)) % len(self.microbatches)


@dataclass
class AuditSchedule:
    """The audits of a run in one layout.

    `interval`: steps between two audits, 0: none; `set_interval` changes it. `ranks_per_unit`: ranks that compute their
    microbatches together, since they share experts; those of one unit are audited by those of another, at the same
    places. `more_steps`: committed steps after which the next one is audited too.
    """

    interval: int
    seed: int
    microbatches_by_rank: tuple[range, ...]
    ranks_per_unit: int = 1
    more_steps: frozenset[int] = frozenset()
    _first_step: int = field(default=0, init=False)  # from which the interval holds
    _first_number: int = field(default=0, init=False)  # of the audit before it

    def is_due(self, step: int) -> bool:
        """Return whether the step after `step` committed ones is audited."""
        if not self.interval:
            return False
        return (step + 1 - self._first_step) % self.interval == 0 or step in self.more_steps

    def set_interval(self, step: int, interval: int) -> None:
        """Change the interval, from the audit of the step after `step` committed ones on. Call alike on all ranks."""
        self._first_number = self._get_number(step)
        self._first_step, self.interval = step + 1, interval

    def _get_number(self, step: int) -> int:
        return self._first_number + (step + 1 - self._first_step) // self.interval

    @property
    def has_other_ranks(self) -> bool:
        """Whether a rank is audited by another one. By itself, it may make an error again."""
        return len(self.microbatches_by_rank) > 1

    @property
    def shifts(self) -> Sequence[int]:
        """The shifts that give each rank another one to audit; only 0, itself, for a single rank."""
        num_ranks = len(self.microbatches_by_rank)
        if num_ranks == 1:
            return [0]
        step = self.ranks_per_unit if num_ranks > self.ranks_per_unit else 1
        return range(step, num_ranks, step)

    def plan(self, step: int) -> Audit:
        """Return the audit of the step after `step` committed ones, the same on all ranks.

        Among as many audits in a row as there are shifts, each rank meets each other one; microbatches are random.
        """
        number = self._get_number(step)
        period, position = divmod(number, len(self.shifts))
        order = list(self.shifts)
        _make_generator(self.seed, "shifts", period).shuffle(order)
        generator = _make_generator(self.seed, "microbatches", number)
        microbatches = tuple(generator.choice(of_rank) for of_rank in self.microbatches_by_rank)
        return Audit(order[position], microbatches, number)

    def get_slot(self, audit: Audit, layout: Layout, rank: int) -> int:
        """Return the number of the audited microbatch of a rank of the layout among the microbatches that it owns."""
        dp_rank = layout.get_dp_rank(rank)
        return audit.microbatches[dp_rank] - self.microbatches_by_rank[dp_rank].start

    def list_arbitration_shifts(self, audit: Audit) -> list[int]:
        """Return the shifts of the passes that decide a mismatch: both ranks again, and a third one if there is one."""
        third = [shift for shift in self.shifts if shift != audit.shift]
        return [0, audit.shift, *third[:1]]


def choose_interval(setting: int | Auto, microbatches_by_rank: Sequence[range]) -> int:
    """Return the steps between two audits. auto: at first; see `audit_cost.adapt_interval`, which knows the cost."""
    if setting != AUTO:
        return int(setting)
    fewest = min(len(of_rank) for of_rank in microbatches_by_rank)
    return ceil((PASSES_COST / fewest + _REDUCTION_AND_UPDATE_COST) / MAX_AUTO_COST)


def count_ranks_per_unit(layout: Layout) -> int:
    """Return how many data-parallel ranks share one set of experts."""
    return max(1, layout.ep // layout.cp)


def _make_generator(seed: int, purpose: str, number: int) -> random.Random:
    digest = hashlib.blake2b(f"audit {seed} {purpose} {number}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "little"))
