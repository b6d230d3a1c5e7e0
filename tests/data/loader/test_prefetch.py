"""Prefetcher: bounded, in order, raises errors in place, and stops on close."""

from __future__ import annotations

import threading
import time

import pytest

from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.errors import DataError


def generate_numbers(limit, produced, error=None):
    try:
        for number in range(limit):
            produced.append(number)
            yield number
        if error:
            raise error
    finally:
        produced.append("closed")


def wait_until_idle(produced):
    before = -1
    while before != len(produced):
        before = len(produced)
        time.sleep(0.05)
    return before


@pytest.mark.parametrize(("items", "size", "ahead"), [(5, 1, 5), (50, 300, 3), (50, 5000, 1)])
def test_prefetch_is_bounded_by_items_and_bytes(items, size, ahead):
    produced = []
    prefetcher = Prefetcher(generate_numbers(100, produced), size=lambda _: size, max_items=items, max_bytes=1000)
    assert wait_until_idle(produced) == ahead + 1  # one more is produced and waits for room
    assert prefetcher.backlog == (ahead, ahead * size)
    assert [prefetcher.take() for _ in range(20)] == list(range(20))
    prefetcher.close()
    assert produced[-1] == "closed"


def test_generator_error_is_raised_in_place_of_its_item():
    prefetcher = Prefetcher(generate_numbers(3, [], ValueError("broken")), size=lambda _: 1, max_items=10, max_bytes=10)
    assert [prefetcher.take() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            prefetcher.take()
    prefetcher.close()


def test_take_after_the_last_item_raises():
    prefetcher = Prefetcher(generate_numbers(1, []), size=lambda _: 1, max_items=10, max_bytes=10)
    prefetcher.take()
    with pytest.raises(DataError, match="nothing is left"):
        prefetcher.take()
    prefetcher.close()


def test_close_stops_the_thread():
    before = threading.active_count()
    prefetcher = Prefetcher(generate_numbers(100, []), size=lambda _: 1, max_items=2, max_bytes=10)
    prefetcher.close()
    assert threading.active_count() == before
