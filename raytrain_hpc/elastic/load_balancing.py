"""Microbatches shared out by how fast ranks are: the one case of shares more than one apart. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_hpc.planner.layout import Batching, Layout


@dataclass(frozen=True)
class UnevenBatching(Batching):
    """`counts[r]`: microbatches of data-parallel rank r."""

    counts: tuple[int, ...]

    def split_by_rank(self, dp_size: int) -> list[range]:
        """The microbatches of each data-parallel rank: contiguous runs. For another degree they are even again."""
        if dp_size != len(self.counts):
            return super().split_by_rank(dp_size)
        ends = [sum(self.counts[: rank + 1]) for rank in range(dp_size)]
        return [range(end - count, end) for end, count in zip(ends, self.counts, strict=True)]


def balance_by_speed(batching: Batching, layout: Layout, microbatch_times: Sequence[float]) -> Batching:
    """The same microbatches, shared out so that the last rank to finish finishes soonest.

    `pace[r]`: how long rank r takes for a microbatch, in any unit; of a data-parallel rank the slowest member counts.
    Everyone keeps one at least. As it was where all ranks must run equally many passes, or a schedule refuses it.
    """
    took = [0.0] * layout.dp_size
    for rank, seconds in enumerate(microbatch_times):
        took[layout.get_dp_rank(rank)] = max(took[layout.get_dp_rank(rank)], seconds)
    counts = [1] * layout.dp_size
    for _ in range(batching.count - layout.dp_size):
        soonest = min(range(len(counts)), key=lambda rank: ((counts[rank] + 1) * took[rank], rank))
        counts[soonest] += 1
    refused = any(layout.pipeline.find_conflict(count) is not None for count in set(counts))
    if layout.is_lockstep or refused or counts == [len(share) for share in batching.split_by_rank(layout.dp_size)]:
        return batching
    return UnevenBatching(batching.count, batching.size, tuple(counts))
