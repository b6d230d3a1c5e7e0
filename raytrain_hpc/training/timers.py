"""Timers of a step and its phases, and their statistics over ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from raytrain_hpc.torch_device import get_device_module, is_accelerator

StepPhase = Literal["forward", "backward", "communication", "optimizer"]
STEP_PHASES: tuple[StepPhase, ...] = ("forward", "backward", "communication", "optimizer")


class PhaseTimer:
    """Timer of the phases of a step. On an accelerator by events, which are read one step later, without a wait."""

    def __init__(self, device: torch.device):
        self._make_event = _get_event_factory(device)
        self._seconds = dict.fromkeys(STEP_PHASES, 0.0)
        self._events: list[tuple[StepPhase, Any, Any]] = []  # begin and end of a phase
        self._previous_events = list(self._events)

    @contextmanager
    def phase(self, name: StepPhase) -> Iterator[None]:
        """Add the time of the context to a phase."""
        if self._make_event is not None:
            begin, end = self._make_event(), self._make_event()
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def read_and_reset(self) -> dict[StepPhase, float]:
        """Return the seconds of each phase since the last call, and reset them. On accelerators: between the last two.

        Waiting for the optimizer of this step would leave the device without work until the next one is launched.
        """
        for name, begin, end in self._previous_events:
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1e3
        self._previous_events, self._events = self._events, []
        seconds, self._seconds = self._seconds, dict.fromkeys(STEP_PHASES, 0.0)
        return seconds


def _get_event_factory(device: torch.device) -> Callable[[], Any] | None:
    """Return what makes the events that measure an accelerator's time, None for a CPU."""
    return partial(get_device_module(device).Event, enable_timing=True) if is_accelerator(device) else None


class StepTimer:
    """Timer of steps, each from the end of the previous one, so that all time of the loop is counted."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def end_step(self) -> float:
        """End the current step, begin the next one, and return the seconds of the current one."""
        step_start_s, self._start_s = self._start_s, time.perf_counter()
        return self._start_s - step_start_s

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Exclude the time of the context from all steps."""
        began = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - began


def reduce_over_ranks(
    values: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Return mean, min, max and std of each value over the ranks of a group, as "ranks/NAME/mean" and so on.

    Collective if there is a group; all ranks must pass the same names in the same order.
    """
    row = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    rows = [row]
    if group is not None:
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, row, group=group)
    table = torch.stack(rows)
    statistics = {
        "mean": table.mean(0),
        "min": table.amin(0),
        "max": table.amax(0),
        "std": table.std(0, correction=0),
    }
    columns = {kind: row.tolist() for kind, row in statistics.items()}
    return {f"ranks/{name}/{kind}": columns[kind][index] for index, name in enumerate(values) for kind in columns}
