"""Comparison of what several ranks have computed for the same shards of the state, in audits.

A shard is computed by the ranks that hold it and by another one, from the same inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.audit_verdict import Computation, Entry, Finding, find_faults, judge, merge_findings
from raytrain_hpc.elastic.shard_holders import ParameterKind, ShardHolders, ShardPlace
from raytrain_hpc.parallel.computation_trace import ShardTraces, Trace

Key = tuple[ParameterKind, ShardPlace]
Place = tuple[int, int]  # (rank, number of one of its traces)


class ShardComputations:
    """The computations of all shards by all ranks, in one or several attempts.

    `subject`: what is computed. `by_copy`: the ranks that hold a shard compute a slice of it each, not all of it.
    """

    def __init__(self, context: ParallelContext, holders: ShardHolders, subject: str, *, by_copy: bool = False):
        self._context, self._holders, self._subject, self._by_copy = context, holders, subject, by_copy
        self._traces: list[Trace] = []  # of this rank
        self._computations: dict[Key, list[Computation]] = {}
        self._differing: set[Key] = set()

    def add(self, traces: Mapping[ParameterKind, ShardTraces]) -> bool:
        """Add an attempt, and return whether two of its computations differ. Collective over all ranks.

        `traces`: by each kind of parameters, with equal shifts on all ranks.
        """
        first, attempt = len(self._traces), dict[Key, list[Computation]]()
        own = [trace for of_kind in traces.values() for trace in (of_kind.own, of_kind.other)]
        self._traces += own
        totals = self._gather([trace.compute_total(self._context.device) for trace in own])
        for index, (kind, of_kind) in enumerate(traces.items()):
            for ranks in self._list_executors(kind):
                keys = [self._get_key(kind, ranks[0], 0, 0)]
                if of_kind.shard_shift or of_kind.copy_shift:
                    keys.append(self._get_key(kind, ranks[0], of_kind.shard_shift, of_kind.copy_shift))
                for number, key in enumerate(keys, start=2 * index):
                    places = tuple((rank, first + number) for rank in ranks)
                    signature = tuple(totals[rank][number] for rank in ranks)
                    attempt.setdefault(key, []).append(Computation(ranks[0], places, signature))
        differing = {key for key, of_key in attempt.items() if len({made.signature for made in of_key}) > 1}
        self._differing |= differing
        for key, of_key in attempt.items():
            self._computations.setdefault(key, []).extend(of_key)
        return bool(differing)

    @property
    def has_differed(self) -> bool:
        """Whether computations of some attempt differed."""
        return bool(self._differing)

    def find_faults(self) -> list[Finding]:
        """Return who is at fault for what differed. Collective over all ranks. Call after the last attempt."""
        judged = {key: self._computations[key] for key in sorted(self._differing)}
        judged = {key: made for key, made in judged.items() if len({one.signature for one in made}) > 1}
        entries = self._gather_entries({place for made in judged.values() for one in made for place in one.places})
        findings = list[Finding]()
        for made in judged.values():
            traces = [[entries[place] for place in one.places] for one in made]
            findings += find_faults(self._subject, made, judge(made), traces)
        return merge_findings(findings)

    def _list_executors(self, kind: ParameterKind) -> list[list[int]]:
        """Return the ranks that compute something together: those that hold a shard, if each computes a slice of it."""
        ranks = range(self._context.layout.world_size)
        if not self._by_copy or self._holders.count_shards(kind) == 1:
            return [[rank] for rank in ranks]
        by_shard: dict[tuple[object, ...], list[int]] = {}
        for rank in sorted(ranks, key=lambda rank: self._holders.get_place(kind, rank).copy):
            by_shard.setdefault(self._holders.get_place(kind, rank)[:2], []).append(rank)
        return list(by_shard.values())

    def _get_key(self, kind: ParameterKind, rank: int, shard_shift: int, copy_shift: int) -> Key:
        place = self._holders.get_place(kind, self._holders.move(kind, rank, shard_shift))
        copy = (place.copy + copy_shift) % self._holders.count_copies(kind) if self._by_copy else 0
        return kind, place._replace(copy=copy)

    def _gather(self, hashes: list[torch.Tensor]) -> list[list[int]]:
        """Return the hashes of all ranks."""
        own = torch.stack(hashes)
        if self._context.world_group is None:
            return [own.tolist()]
        gathered = [torch.empty_like(own) for _ in range(self._context.layout.world_size)]
        dist.all_gather(gathered, own, group=self._context.world_group)
        by_rank: list[list[int]] = torch.stack(gathered).tolist()
        return by_rank

    def _gather_entries(self, wanted: set[Place]) -> dict[Place, list[Entry]]:
        own = {
            (rank, number): self._traces[number].to_entries() for rank, number in wanted if rank == self._context.rank
        }
        gathered = [own] * self._context.layout.world_size
        if self._context.world_group is not None:
            dist.all_gather_object(gathered, own, group=self._context.world_group)
        return {place: entries for of_rank in gathered for place, entries in of_rank.items()}
