"""Load balancing: give slow ranks fewer microbatches. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_hpc.planner.layout import Batching, Layout


@dataclass(frozen=True)
class UnevenBatching(Batching):
    """A batching that gives data-parallel rank r `counts[r]` microbatches."""

    counts: tuple[int, ...]

    def split_by_rank(self, dp_size: int) -> list[range]:
        """Return the contiguous range of microbatches of each data-parallel rank.

        Falls back to an even split if `dp_size` is not the one that the counts were computed for.
        """
        if dp_size != len(self.counts):
            return super().split_by_rank(dp_size)
        stops = [sum(self.counts[: rank + 1]) for rank in range(dp_size)]
        return [range(stop - count, stop) for stop, count in zip(stops, self.counts, strict=True)]


def balance_by_speed(batching: Batching, layout: Layout, microbatch_times: Sequence[float]) -> Batching:
    """Split the microbatches over the data-parallel ranks so that the last rank finishes as early as possible.

    Call when stragglers are to be given less work. `microbatch_times[r]`: time that rank r takes per microbatch, in
    any unit; the slowest member determines the speed of a data-parallel rank. Every rank keeps at least one
    microbatch. Returns `batching` unchanged if the even split is already the best one, if all ranks must run the same
    number of passes, or if the pipeline schedule does not accept one of the counts.
    """
    dp_rank_times = [0.0] * layout.dp_size
    for rank, time in enumerate(microbatch_times):
        dp_rank_times[layout.get_dp_rank(rank)] = max(dp_rank_times[layout.get_dp_rank(rank)], time)
    counts = [1] * layout.dp_size
    for _ in range(batching.count - layout.dp_size):
        earliest = min(range(len(counts)), key=lambda rank: ((counts[rank] + 1) * dp_rank_times[rank], rank))
        counts[earliest] += 1
    has_conflict = any(layout.pipeline.find_conflict(count) is not None for count in set(counts))
    if layout.is_lockstep or has_conflict or counts == [len(r) for r in batching.split_by_rank(layout.dp_size)]:
        return batching
    return UnevenBatching(batching.count, batching.size, tuple(counts))
