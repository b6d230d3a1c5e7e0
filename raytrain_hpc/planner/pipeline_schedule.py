"""Pipeline schedules: the order in which each pipeline rank computes the passes of its stages and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

ActionKind = Literal["F", "B", "I", "W"]  # forward; backward; backward of inputs only; backward of weights only
ScheduleName = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True, slots=True)
class Action:
    """One pass of one microbatch through one stage."""

    kind: ActionKind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


PipelineOrder = tuple[Action, ...]  # the actions of one rank


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule for `num_ranks` pipeline ranks with `stages_per_rank` stages each.

    | name | order | source |
    | --- | --- | --- |
    | gpipe | all forward passes, then all backward passes | Huang et al. 2019, arXiv 1811.06965 |
    | 1f1b | alternate forward and backward once the pipeline is full | Narayanan et al. 2021, arXiv 2006.09503 |
    | interleaved_1f1b | 1f1b with several stages per rank | Narayanan et al. 2021, arXiv 2104.04473 |
    | interleaved_zero_bubble | split backward, weights fill the bubble (ZB-H1) | Qi et al. 2023, arXiv 2401.10241 |
    | zbv | ZB-V: two stages per rank, placed in a V | Qi et al. 2023, section 6 |
    """

    name: ScheduleName
    num_ranks: int
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages of the whole pipeline."""
        return self.num_ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed in separate passes."""
        return self.name in ("interleaved_zero_bubble", "zbv")

    def get_rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank of a stage: round robin, or there and back in a V for zbv."""
        if self.name == "zbv" and stage >= self.num_ranks:
            return self.num_stages - 1 - stage
        return stage % self.num_ranks

    def get_stages_of_rank(self, rank: int) -> list[int]:
        """Return the stages of a pipeline rank, in the order of the model."""
        return [stage for stage in range(self.num_stages) if self.get_rank_of_stage(stage) == rank]

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs (sender, receiver) of pipeline ranks, in the same order on all ranks."""
        hops = [(self.get_rank_of_stage(s), self.get_rank_of_stage(s + 1)) for s in range(self.num_stages - 1)]
        return sorted({pair for a, b in hops if a != b for pair in ((a, b), (b, a))})

    def get_representative_microbatches(self, microbatches: int) -> int:
        """Return a smaller number of microbatches with the same bubble and the same activations in flight.

        At most `microbatches`; used to simulate long steps cheaply.
        """
        count = min(microbatches, 4 * self.num_ranks)
        while count < microbatches and self.find_conflict(count):
            count += 1
        return count

    def find_conflict(self, microbatches: int) -> str | None:
        """Return the reason why this number of microbatches cannot run, or None."""
        if not self.name.startswith("interleaved"):
            return None
        rounds = max(1, microbatches // self.num_ranks)
        if microbatches % rounds:
            return (
                f"{self.name} needs {rounds} equal rounds; {microbatches} microbatches are not a multiple of {rounds}"
            )
        return None

    def build_orders(self, microbatches: int) -> list[PipelineOrder]:
        """Return the actions of every rank. Raises ValueError if `find_conflict` finds a conflict."""
        if reason := self.find_conflict(microbatches):
            raise ValueError(reason)
        if self.name == "zbv":
            return [tuple(_iter_zbv_actions(self, rank, microbatches)) for rank in range(self.num_ranks)]
        return [tuple(_iter_looped_actions(self, rank, microbatches)) for rank in range(self.num_ranks)]

    def build_forward_orders(self, microbatches: int) -> list[PipelineOrder]:
        """Return the actions of every rank for forward passes only, as in an evaluation."""
        return [
            tuple(Action("F", stage, m) for stage in self.get_stages_of_rank(rank) for m in range(microbatches))
            for rank in range(self.num_ranks)
        ]


def _iter_looped_actions(schedule: PipelineSchedule, rank: int, microbatches: int) -> Iterator[Action]:
    """Yield the actions of a rank, for all schedules but zbv: warm-up forwards, then forwards and backwards in turn."""
    stages = schedule.get_stages_of_rank(rank)
    num_passes = len(stages) * microbatches
    forwards = _list_in_rounds(schedule, stages, microbatches)
    backwards = _list_in_rounds(schedule, stages[::-1], microbatches)
    warmup = min(num_passes, _count_warmup_forwards(schedule, rank, microbatches))
    yield from (Action("F", *position) for position in forwards[:warmup])
    delay = rank if schedule.splits_backward else 0  # passes by which weight gradients lag behind input gradients
    for index, position in enumerate(backwards):
        if warmup + index < num_passes:
            yield Action("F", *forwards[warmup + index])
        yield Action("I" if schedule.splits_backward else "B", *position)
        if schedule.splits_backward and index >= delay:
            yield Action("W", *backwards[index - delay])
    if delay:
        yield from (Action("W", *position) for position in backwards[max(0, num_passes - delay) :])


def _count_warmup_forwards(schedule: PipelineSchedule, rank: int, microbatches: int) -> int:
    ranks_after = schedule.num_ranks - 1 - rank
    if schedule.name == "gpipe":
        return microbatches
    if schedule.name == "1f1b":
        return ranks_after
    first_rounds = (schedule.stages_per_rank - 1) * _get_round_size(schedule, microbatches)
    return first_rounds + ranks_after * (1 if schedule.splits_backward else 2)


def _get_round_size(schedule: PipelineSchedule, microbatches: int) -> int:
    return microbatches // max(1, microbatches // schedule.num_ranks)


def _list_in_rounds(schedule: PipelineSchedule, stages: list[int], microbatches: int) -> list[tuple[int, int]]:
    """Return (stage, microbatch) pairs in rounds: a round of microbatches passes one stage, then the next."""
    size = _get_round_size(schedule, microbatches) if len(stages) > 1 else microbatches
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    return [(stage, m) for round_microbatches in rounds for stage in stages for m in round_microbatches]


def _iter_zbv_actions(schedule: PipelineSchedule, rank: int, microbatches: int) -> Iterator[Action]:
    """Return the actions of a rank in the order of the ZB-V paper.

    The order is built for enough microbatches to fill the pipeline; actions of surplus microbatches are dropped.
    """
    down_stage, up_stage = schedule.get_stages_of_rank(rank)
    ranks_left = schedule.num_ranks - rank
    filled = max(microbatches, 2 * schedule.num_ranks - 1)
    counts: dict[tuple[ActionKind, int], int] = {}
    order: list[Action] = []

    def add(stage: int, *kinds: ActionKind) -> None:
        for kind in kinds:
            number = counts.get((kind, stage), 0)
            counts[kind, stage] = number + 1
            order.append(Action(kind, stage, number))

    for _ in range(2 * ranks_left - 1):
        add(down_stage, "F")
    for _ in range(rank):
        add(up_stage, "F")
        add(down_stage, "F")
    for _ in range(ranks_left):
        add(up_stage, "F", "I", "W")
    while counts["F", up_stage] < counts["F", down_stage] or counts["F", down_stage] < filled:
        if counts["F", down_stage] < filled:
            add(down_stage, "F")
        add(down_stage, "I", "W")
        add(up_stage, "F", "I", "W")
    for _ in range(rank):
        add(down_stage, "I")
        add(up_stage, "I")
    for _ in range(ranks_left):
        add(down_stage, "I", "W")
    for stage in (up_stage, down_stage):
        while counts["W", stage] < counts["I", stage]:
            add(stage, "W")
    return (action for action in order if action.microbatch < microbatches)
