"""Pipelines whose stages only take their time, on four ranks: `python -m tests.parallel.pipeline_bubble`.

Prints each schedule's idle share as the simulator says and as measured, stages sleeping.
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
from raytrain_hpc.planner.pipeline_timeline import Span, compute_idle_fraction, count_max_in_flight, simulate
from tests.warm_pool import WarmPool

SECONDS = {"F": 0.08, "I": 0.10, "W": 0.06, "B": 0.16}
WIDTH = 3
REPEATS = 5


class Clock:
    """Time of a rank that passes only where it is said to, or really."""

    def __init__(self, sleeps: bool):
        self.now, self._sleeps = 0.0, sleeps

    def work(self, seconds: float, since: float) -> float:
        """Start at the earliest at `since`, take so long; when that is done."""
        self.now = max(self.now, since) + seconds
        if self._sleeps:
            time.sleep(seconds)
        return self.now


class TimedStage:
    """A stage that takes its time. What it hands on says when it was done, what it is for and what number it has."""

    def __init__(self, number: int, last: int, clock: Clock, finished: dict[Action, float]):
        self.number, self.last, self.clock, self.finished = number, last, clock, finished
        self.held: set[int] = set()
        self.most = 0

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        self.held.add(microbatch)
        self.most = max(self.most, len(self.held))
        done = self._work("F", microbatch, x, first=self.number == 0)
        return None if self.number == self.last else torch.tensor([done, self.number + 1, microbatch])

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        done = self._work("I" if split else "B", microbatch, gradient, first=self.number == self.last)
        if not split:
            self.held.remove(microbatch)
        return None if self.number == 0 else torch.tensor([done, self.number - 1, microbatch])

    def backward_weight(self, microbatch: int) -> None:
        self._work("W", microbatch, None, first=True)
        self.held.remove(microbatch)

    def _work(self, kind: str, microbatch: int, received: Tensor | None, *, first: bool) -> float:
        if (received is None) is not first:
            raise RuntimeError(f"stage {self.number} got {received} for {kind}{microbatch}")
        if received is not None and received[1:].tolist() != [self.number, microbatch]:
            raise RuntimeError(f"stage {self.number} got the message {received.tolist()} for {kind}{microbatch}")
        done = self.clock.work(SECONDS[kind], 0.0 if received is None else received[0].item())
        self.finished[Action(kind, self.number, microbatch)] = done
        return done


def make_schedule(name: ScheduleName) -> PipelineSchedule:
    """Four ranks, two stages each where the schedule knows more than one."""
    return PipelineSchedule(name, 4, 1 if name in ("gpipe", "1f1b") else 2)


def run_schedule(rank: int, meeting: Rendezvous, name: ScheduleName, microbatches: int, sleeps: bool):
    """(Spans, most microbatches held a stage, elements sent, when each action was done on the clocks) of a rank."""
    schedule = make_schedule(name)
    layout = Layout(pp=4, schedule=name, virtual_stages=schedule.stages_per_rank)
    place = init_process_groups(meeting, rank, layout, torch.device("cpu"))
    clock, finished = Clock(sleeps), {}
    stages = {
        stage: TimedStage(stage, schedule.num_stages - 1, clock, finished)
        for stage in schedule.get_stages_of_rank(rank)
    }
    dist.barrier()
    pipeline = Pipeline(schedule, rank, place.stage_groups)
    spans = pipeline.run(schedule.build_orders(microbatches), stages, lambda: torch.empty(WIDTH))
    return spans, {stage: one.most for stage, one in stages.items()}, place.stage_groups.traffic.elements, finished


def main() -> None:
    """A line a schedule: median of the measured idle shares."""
    pool = WarmPool()
    print("| schedule | simulated idle | measured idle | microbatches held, by rank |\n| --- | --- | --- | --- |")
    for name in SCHEDULE_NAMES:
        schedule = make_schedule(name)
        orders = schedule.build_orders(8)
        expected = compute_idle_fraction(simulate(orders, lambda action: SECONDS[action.kind], schedule.num_stages), 4)
        measured = []
        for _ in range(REPEATS):
            answers = pool.call(run_schedule, 4, name, 8, True)
            spans: list[Span] = [span for of_rank, *_ in answers for span in of_rank]
            measured.append(compute_idle_fraction(spans, 4))
            held = [in_flight for _, in_flight, *_ in answers]
            if held != [count_max_in_flight(order) for order in orders]:
                raise RuntimeError(f"{name} held {held}")
        most = " ".join("+".join(str(number) for number in of_rank.values()) for of_rank in held)
        print(f"| {name} | {100 * expected:.1f} % | {100 * statistics.median(measured):.1f} % | {most} |", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
