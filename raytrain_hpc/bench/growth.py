"""Growth in `bench recovery`: a run on one rank continues on two, while it trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal

GROWTH: Literal["growth, 1 to 2 ranks"] = "growth, 1 to 2 ranks"
_STEPS_AFTER = 3  # on two ranks, until the change counts as done
_WORLD = "elastic/world_size"


def find_pause(steps: Sequence[dict[str, Any]], requested: float) -> tuple[float, float, int] | None:
    """Return the longest time between two steps, the time until two ranks have trained one, and the repeated steps.

    `steps`: of a run, in the order in which they were completed. `requested`: Unix time at which it was to grow. None:
    fewer than four steps have been completed on two ranks yet.
    """
    on_two = [number for number, step in enumerate(steps) if step[_WORLD] == 2 and step["time/unix"] > requested]
    if len(on_two) <= _STEPS_AFTER:
        return None
    begin = max(number for number, step in enumerate(steps) if step["time/unix"] <= requested)
    during = steps[begin : on_two[_STEPS_AFTER] + 1]
    pause_s = max(after["time/unix"] - before["time/unix"] for before, after in pairwise(during))
    repeated = max(0, *(before["step"] - after["step"] + 1 for before, after in pairwise(during)))
    return pause_s, steps[on_two[0]]["time/unix"] - requested, repeated


def wait_for_growth(
    read_steps: Callable[[], list[dict[str, Any]]], requested: float, timeout_s: float
) -> tuple[float, float, int] | None:
    """Return what `find_pause` returns, as soon as it does; None after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (found := find_pause(read_steps(), requested)) is not None:
            return found
        time.sleep(0.02)
    return None
