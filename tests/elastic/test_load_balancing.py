"""Microbatches by pace: the soonest end of all ways to share them out, found by trying them all."""

from __future__ import annotations

from itertools import product

import pytest

from raytrain_hpc.elastic.load_balancing import UnevenBatching, balance_by_speed
from raytrain_hpc.planner.layout import Batching, Layout


def ends(counts: tuple[int, ...], pace: tuple[float, ...]) -> float:
    return max(count * seconds for count, seconds in zip(counts, pace, strict=True))


@pytest.mark.parametrize("pace", [(1.0, 3.0, 1.0), (1.0, 1.0, 9.0), (2.0, 1.0), (1.0, 1.5, 2.0, 4.0), (5.0, 1.0)])
@pytest.mark.parametrize("count", [4, 7, 12])
def test_the_last_to_finish_finishes_soonest(pace: tuple[float, ...], count: int) -> None:
    batching, ranks = Batching(count, 2), len(pace)
    shares = balance_by_speed(batching, Layout(dp_replicate=ranks), pace).split_by_rank(ranks)
    assert [number for share in shares for number in share] == list(range(count)), "contiguous, each once"
    counts = tuple(len(share) for share in shares)
    ways = [way for way in product(range(1, count + 1), repeat=ranks) if sum(way) == count]
    assert ends(counts, pace) == min(ends(way, pace) for way in ways)


def test_equal_paces_leave_it_as_it_was() -> None:
    batching = Batching(12, 2)
    assert balance_by_speed(batching, Layout(dp_replicate=3), [1.0, 1.0, 1.0]) is batching


def test_the_slowest_member_of_a_data_rank_counts() -> None:
    layout = Layout(dp_replicate=2, tp=2)
    made = balance_by_speed(Batching(8, 1), layout, [1.0, 1.0, 1.0, 3.0])
    assert isinstance(made, UnevenBatching) and made.counts == (6, 2)
    assert [len(share) for share in made.split_by_rank(4)] == [2, 2, 2, 2], "for another degree they are even again"


def test_where_all_run_as_many_passes_nothing_changes() -> None:
    batching = Batching(8, 1)
    assert balance_by_speed(batching, Layout(dp_shard=2, zero=3), [1.0, 3.0]) is batching
