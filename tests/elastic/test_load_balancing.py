"""Load balancing against a brute-force search over all ways to split the microbatches."""

from __future__ import annotations

from itertools import product

import pytest

from raytrain_hpc.elastic.load_balancing import UnevenBatching, balance_by_speed
from raytrain_hpc.planner.layout import Batching, Layout


def compute_finish_time(counts: tuple[int, ...], times: tuple[float, ...]) -> float:
    return max(count * seconds for count, seconds in zip(counts, times, strict=True))


@pytest.mark.parametrize("times", [(1.0, 3.0, 1.0), (1.0, 1.0, 9.0), (2.0, 1.0), (1.0, 1.5, 2.0, 4.0), (5.0, 1.0)])
@pytest.mark.parametrize("count", [4, 7, 12])
def test_the_slowest_rank_finishes_as_early_as_possible(times: tuple[float, ...], count: int) -> None:
    batching, ranks = Batching(count, 2), len(times)
    shares = balance_by_speed(batching, Layout(dp_replicate=ranks), times).split_by_rank(ranks)
    assert [number for share in shares for number in share] == list(range(count)), "contiguous, each microbatch once"
    counts = tuple(len(share) for share in shares)
    splits = [split for split in product(range(1, count + 1), repeat=ranks) if sum(split) == count]
    assert compute_finish_time(counts, times) == min(compute_finish_time(split, times) for split in splits)


def test_equal_speeds_keep_the_batching() -> None:
    batching = Batching(12, 2)
    assert balance_by_speed(batching, Layout(dp_replicate=3), [1.0, 1.0, 1.0]) is batching


def test_the_slowest_member_sets_the_speed_of_a_dp_rank() -> None:
    layout = Layout(dp_replicate=2, tp=2)
    balanced = balance_by_speed(Batching(8, 1), layout, [1.0, 1.0, 1.0, 3.0])
    assert isinstance(balanced, UnevenBatching) and balanced.counts == (6, 2)
    assert [len(share) for share in balanced.split_by_rank(4)] == [2, 2, 2, 2], "an even split for another dp_size"


def test_lockstep_layouts_keep_the_batching() -> None:
    batching = Batching(8, 1)
    assert balance_by_speed(batching, Layout(dp_shard=2, zero=3), [1.0, 3.0]) is batching
