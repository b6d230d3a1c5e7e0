"""Where the time of a step goes on a rank, and how ranks differ in that."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist

StepPhase = Literal["forward", "backward", "communication", "optimizer"]
STEP_PHASES: tuple[StepPhase, ...] = ("forward", "backward", "communication", "optimizer")


class PhaseTimer:
    """Adds up the parts of a step. A GPU times its own work, by events, which are read when the step is over."""

    def __init__(self, device: torch.device):
        self._use_cuda_events = device.type == "cuda"
        self._seconds = dict.fromkeys(STEP_PHASES, 0.0)
        self._events: list[tuple[StepPhase, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def phase(self, name: StepPhase) -> Iterator[None]:
        """What happens inside is this part of the step."""
        if self._use_cuda_events:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()  # type: ignore[no-untyped-call]
            yield
            end.record()  # type: ignore[no-untyped-call]
            self._events.append((name, begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - began

    def read_and_reset(self) -> dict[StepPhase, float]:
        """Seconds of each part since it was read last."""
        for part, begin, end in self._events:
            end.synchronize()  # type: ignore[no-untyped-call]
            self._seconds[part] += begin.elapsed_time(end) / 1e3  # type: ignore[no-untyped-call]
        self._events.clear()
        seconds, self._seconds = self._seconds, dict.fromkeys(STEP_PHASES, 0.0)
        return seconds


class StepTimer:
    """Times steps from the end of the one before to their own end, so that nothing of a loop's time goes uncounted."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def end_step(self) -> float:
        """Seconds of the step that ends now. The next one begins."""
        since, self._start_s = self._start_s, time.perf_counter()
        return self._start_s - since

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """What happens inside belongs to no step."""
        began = time.perf_counter()
        yield
        self._start_s += time.perf_counter() - began


def reduce_over_ranks(
    values: Mapping[str, float], group: dist.ProcessGroup | None, device: torch.device
) -> dict[str, float]:
    """Mean, least, largest and standard deviation over the ranks of a group, as "ranks/NAME/mean" and so on.

    Collective where there is a group; all ranks name the same things.
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
    return {f"ranks/{name}/{kind}": columns[kind][at] for at, name in enumerate(values) for kind in columns}
