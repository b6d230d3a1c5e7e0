"""Pipeline schedules: which stage of which microbatch a rank computes, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ActionKind = Literal["F", "B", "I", "W"]  # forward; backward, whole, or of the inputs and of the weights apart
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does for one microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


PipelineOrder = tuple[Action, ...]  # of one rank


@dataclass(frozen=True)
class PipelineSchedule:
    """`ranks` pipeline ranks with `per_rank` stages each.

    | name | order | source |
    | --- | --- | --- |
    | gpipe | all forwards, all backwards | Huang et al. 2019, arXiv 1811.06965 |
    | 1f1b | one forward, one backward, once the pipeline is full | Narayanan et al. 2021, arXiv 2006.09503 |
    | interleaved_1f1b | the same with several stages a rank | Narayanan et al. 2021, arXiv 2104.04473 |
    | interleaved_zero_bubble | backward split, weights fill the bubble (ZB-H1) | Qi et al. 2023, arXiv 2401.10241 |
    | zbv | two stages a rank, there and back | the same, section 6 |
    """

    name: ScheduleName
    num_ranks: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return self.name in ("interleaved_zero_bubble", "zbv")

    def get_rank_of_stage(self, stage: int) -> int:
        """Where a stage is: round and round, or for zbv there and back."""
        if self.name == "zbv" and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    def get_stages_of_rank(self, rank: int) -> list[int]:
        """The stages of a rank, in the order of the model."""
        return [stage for stage in range(self.num_stages) if self.get_rank_of_stage(stage) == rank]

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs (from, to) of ranks that anything is sent between, in one order for everybody."""
        ways = [(self.get_rank_of_stage(s), self.get_rank_of_stage(s + 1)) for s in range(self.num_stages - 1)]
        return sorted({pair for a, b in ways if a != b for pair in ((a, b), (b, a))})

    def get_representative_microbatches(self, microbatches: int) -> int:
        """As many as show all that so many do, where more change nothing: what the schedule takes of at most that."""
        some = min(microbatches, 4 * self.num_ranks)
        while some < microbatches and self.find_conflict(some):
            some += 1
        return some

    def find_conflict(self, microbatches: int) -> str | None:
        """Why this number of microbatches cannot run, None where it can."""
        if not self.name.startswith("interleaved"):
            return None
        rounds = max(1, microbatches // self.num_ranks)
        if microbatches % rounds:
            return f"{self.name} runs them in {rounds} equal rounds, which {microbatches} microbatches are not"
        return None

    def build_orders(self, microbatches: int) -> list[PipelineOrder]:
        """The actions of every rank for so many microbatches. Raises ValueError where the schedule refuses them."""
        if reason := self.find_conflict(microbatches):
            raise ValueError(reason)
        if self.name == "zbv":
            return [tuple(_iter_zbv_actions(self, rank, microbatches)) for rank in range(self.num_ranks)]
        return [tuple(_iter_looped_actions(self, rank, microbatches)) for rank in range(self.num_ranks)]

    def build_forward_orders(self, microbatches: int) -> list[PipelineOrder]:
        """The actions of every rank where nothing goes backward, as in an evaluation."""
        return [
            tuple(Action("F", stage, m) for stage in self.get_stages_of_rank(rank) for m in range(microbatches))
            for rank in range(self.num_ranks)
        ]


def _iter_looped_actions(schedule: PipelineSchedule, rank: int, microbatches: int) -> Iterator[Action]:
    """Every schedule but zbv: some forwards to warm up, then forwards and backwards in turn."""
    stages = schedule.get_stages_of_rank(rank)
    total = len(stages) * microbatches
    forwards = _list_in_rounds(schedule, stages, microbatches)
    backwards = _list_in_rounds(schedule, stages[::-1], microbatches)
    warmup = min(total, _count_warmup_forwards(schedule, rank, microbatches))
    yield from (Action("F", *at) for at in forwards[:warmup])
    behind = rank if schedule.splits_backward else 0  # how far the weights stay behind the inputs
    for number, at in enumerate(backwards):
        if warmup + number < total:
            yield Action("F", *forwards[warmup + number])
        yield Action("I" if schedule.splits_backward else "B", *at)
        if schedule.splits_backward and number >= behind:
            yield Action("W", *backwards[number - behind])
    if behind:
        yield from (Action("W", *at) for at in backwards[max(0, total - behind) :])


def _count_warmup_forwards(schedule: PipelineSchedule, rank: int, microbatches: int) -> int:
    after = schedule.num_ranks - 1 - rank
    if schedule.name == "gpipe":
        return microbatches
    if schedule.name == "1f1b":
        return after
    first = (schedule.stages_per_rank - 1) * _get_round_size(schedule, microbatches)
    return first + after * (1 if schedule.splits_backward else 2)


def _get_round_size(schedule: PipelineSchedule, microbatches: int) -> int:
    return microbatches // max(1, microbatches // schedule.num_ranks)


def _list_in_rounds(schedule: PipelineSchedule, stages: list[int], microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch) in rounds: some microbatches through the first of these stages, then through the next."""
    size = _get_round_size(schedule, microbatches) if len(stages) > 1 else microbatches
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    return [(stage, m) for members in rounds for stage in stages for m in members]


def _iter_zbv_actions(schedule: PipelineSchedule, rank: int, microbatches: int) -> Iterator[Action]:
    """The paper's order for as many microbatches as fill the pipeline; those that do not exist are left out."""
    there, back = schedule.get_stages_of_rank(rank)
    after = schedule.num_ranks - rank
    filled = max(microbatches, 2 * schedule.num_ranks - 1)
    made: dict[tuple[ActionKind, int], int] = {}
    order: list[Action] = []

    def add(stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            number = made.get((kind, stage), 0)
            made[kind, stage] = number + 1
            order.append(Action(kind, stage, number))

    for _ in range(2 * after - 1):
        add(there, "F")
    for _ in range(rank):
        add(back, "F")
        add(there, "F")
    for _ in range(after):
        add(back, "F", "I", "W")
    while made["F", back] < made["F", there] or made["F", there] < filled:
        if made["F", there] < filled:
            add(there, "F")
        add(there, "I", "W")
        add(back, "F", "I", "W")
    for _ in range(rank):
        add(there, "I")
        add(back, "I")
    for _ in range(after):
        add(there, "I", "W")
    for stage in (back, there):
        while made["W", stage] < made["I", stage]:
            add(stage, "W")
    return (action for action in order if action.microbatch < microbatches)
