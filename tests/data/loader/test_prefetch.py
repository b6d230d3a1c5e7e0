"""The thread that reads ahead: bounded, in order, honest about errors, and gone when it is closed."""

from __future__ import annotations

import threading
import time

import pytest

from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.errors import DataError


def counting(limit, made, error=None):
    try:
        for number in range(limit):
            made.append(number)
            yield number
        if error:
            raise error
    finally:
        made.append("closed")


def settled(made):
    before = -1
    while before != len(made):
        before = len(made)
        time.sleep(0.05)
    return before


@pytest.mark.parametrize(("items", "size", "ahead"), [(5, 1, 5), (50, 300, 3), (50, 5000, 1)])
def test_bounded_by_number_and_by_bytes(items, size, ahead):
    made = []
    one = Prefetcher(counting(100, made), size=lambda _: size, max_items=items, max_bytes=1000)
    assert settled(made) == ahead + 1  # one more is made and waits for room
    assert one.backlog == (ahead, ahead * size)
    assert [one.take() for _ in range(20)] == list(range(20))
    one.close()
    assert made[-1] == "closed"


def test_an_error_surfaces_where_its_item_is_due():
    one = Prefetcher(counting(3, [], ValueError("broken")), size=lambda _: 1, max_items=10, max_bytes=10)
    assert [one.take() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            one.take()
    one.close()


def test_behind_the_last_item():
    one = Prefetcher(counting(1, []), size=lambda _: 1, max_items=10, max_bytes=10)
    one.take()
    with pytest.raises(DataError, match="nothing is left"):
        one.take()
    one.close()


def test_closing_ends_the_thread():
    before = threading.active_count()
    one = Prefetcher(counting(100, []), size=lambda _: 1, max_items=2, max_bytes=10)
    one.close()
    assert threading.active_count() == before
