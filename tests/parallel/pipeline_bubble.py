"""Pipelines of stages that only sleep, on four ranks: `python -m tests.parallel.pipeline_bubble`.

Prints the idle fraction of each schedule as simulated and as measured.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.parallel.pipeline_parallel import Pipeline
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.planner.pipeline_schedule import SCHEDULE_NAMES, Action, PipelineSchedule, ScheduleName
from raytrain_hpc.planner.pipeline_timeline import Span, compute_idle_fraction, simulate
from tests.pipeline_loads import count_max_in_flight
from tests.warm_pool import WarmPool

SECONDS = {"F": 0.08, "I": 0.10, "W": 0.06, "B": 0.16}
WIDTH = 3
REPEATS = 5


class Clock:
    """The clock of a rank: virtual time, or real time if it sleeps."""

    def __init__(self, sleeps: bool):
        self.now, self._sleeps = 0.0, sleeps

    def work(self, seconds: float, since: float) -> float:
        """Work for `seconds`, starting at `since` or later. Return the end."""
        self.now = max(self.now, since) + seconds
        if self._sleeps:
            time.sleep(seconds)
        return self.now


class TimedStage:
    """A stage that takes a fixed time per action. Messages hold end time, destination and microbatch."""

    def __init__(self, number: int, last: int, clock: Clock, finished: dict[Action, float]):
        self.number, self.last, self.clock, self.finished = number, last, clock, finished
        self.in_flight: set[int] = set()
        self.max_in_flight = 0

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        self.in_flight.add(microbatch)
        self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
        done = self._work("F", microbatch, x, first=self.number == 0)
        return None if self.number == self.last else torch.tensor([done, self.number + 1, microbatch])

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        done = self._work("I" if split else "B", microbatch, gradient, first=self.number == self.last)
        if not split:
            self.in_flight.remove(microbatch)
        return None if self.number == 0 else torch.tensor([done, self.number - 1, microbatch])

    def backward_weight(self, microbatch: int) -> None:
        self._work("W", microbatch, None, first=True)
        self.in_flight.remove(microbatch)

    def _work(self, kind: str, microbatch: int, received: Tensor | None, *, first: bool) -> float:
        if (received is None) is not first:
            raise RuntimeError(f"stage {self.number} got {received} for {kind}{microbatch}")
        if received is not None and received[1:].tolist() != [self.number, microbatch]:
            raise RuntimeError(f"stage {self.number} got the message {received.tolist()} for {kind}{microbatch}")
        done = self.clock.work(SECONDS[kind], 0.0 if received is None else received[0].item())
        self.finished[Action(kind, self.number, microbatch)] = done
        return done


def make_schedule(name: ScheduleName) -> PipelineSchedule:
    """Create a schedule of four ranks, with two stages per rank if the schedule supports it."""
    return PipelineSchedule(name, 4, 1 if name in ("gpipe", "1f1b") else 2)


def run_schedule(rank: int, rendezvous: Rendezvous, name: ScheduleName, microbatches: int, sleeps: bool):
    """Return (spans, most microbatches in flight by stage, elements sent, end time of each action) of a rank."""
    schedule = make_schedule(name)
    layout = Layout(pp=4, schedule=name, virtual_stages=schedule.stages_per_rank)
    context = init_process_groups(rendezvous, rank, layout, torch.device("cpu"))
    clock, finished = Clock(sleeps), {}
    stages = {
        stage: TimedStage(stage, schedule.num_stages - 1, clock, finished)
        for stage in schedule.get_stages_of_rank(rank)
    }
    dist.barrier()
    pipeline = Pipeline(schedule, rank, context.stage_groups)
    spans = pipeline.run(schedule.build_orders(microbatches), stages, lambda: torch.empty(WIDTH))
    return (
        spans,
        {stage: timed_stage.max_in_flight for stage, timed_stage in stages.items()},
        context.stage_groups.traffic.elements,
        finished,
    )


def main() -> None:
    """Print one line per schedule, with the median of the measured idle fractions."""
    pool = WarmPool()
    print("| schedule | simulated idle | measured idle | microbatches held, by rank |\n| --- | --- | --- | --- |")
    for name in SCHEDULE_NAMES:
        schedule = make_schedule(name)
        orders = schedule.build_orders(8)
        expected = compute_idle_fraction(simulate(orders, lambda action: SECONDS[action.kind], schedule.num_stages), 4)
        measured = []
        for _ in range(REPEATS):
            results = pool.call(run_schedule, 4, name, 8, True)
            spans: list[Span] = [span for rank_spans, *_ in results for span in rank_spans]
            measured.append(compute_idle_fraction(spans, 4))
            held = [in_flight for _, in_flight, *_ in results]
            if held != [count_max_in_flight(order) for order in orders]:
                raise RuntimeError(f"{name} held {held}")
        most = " ".join("+".join(str(number) for number in rank_spans.values()) for rank_spans in held)
        print(f"| {name} | {100 * expected:.1f} % | {100 * statistics.median(measured):.1f} % | {most} |", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
