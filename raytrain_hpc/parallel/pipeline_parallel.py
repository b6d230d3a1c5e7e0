"""Pipeline parallelism: a rank carries out its actions, and neighbouring stages hand on what they made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.parallel.blocking_collectives import wait_all
from raytrain_hpc.parallel.mesh_axis import Traffic
from raytrain_hpc.planner.pipeline_schedule import Action, PipelineOrder, PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import Span

Message = tuple[str, int, int]  # "F" or "B", the stage that it is for, the microbatch


class Stage(Protocol):
    """A part of the model, for one microbatch after another."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """What the next stage needs, from what the stage before made; None at either end."""

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        """The gradient of the stage's input, from that of its output; None at either end.

        `split`: gradients of weights may wait for `weights`.
        """

    def backward_weight(self, microbatch: int) -> None:
        """Compute the gradients of weights that a split backward pass left."""


@dataclass(frozen=True)
class StageGroups:
    """A rank's connections: for each direction to or from another rank of the pipeline a group of the two.

    One group a direction, since on NCCL whatever goes through one group goes one after the other.
    """

    groups: Mapping[tuple[int, int], dist.ProcessGroup]  # (from, to), pipeline ranks
    global_ranks: Sequence[int]  # pipeline rank -> rank in the world
    traffic: Traffic = field(default_factory=Traffic, compare=False)


class Pipeline:
    """Pipeline rank `rank` of a schedule."""

    def __init__(self, schedule: PipelineSchedule, rank: int, groups: StageGroups):
        self.schedule, self._rank, self._groups = schedule, rank, groups

    def run(
        self,
        orders: Sequence[PipelineOrder],
        stages: Mapping[int, Stage],
        make_buffer: Callable[[], Tensor],
        synchronize: Callable[[], None] | None = None,
    ) -> list[Span]:
        """Do what the orders say for this rank. `buffer` makes an empty tensor like those that stages exchange.

        Returns when each action ran, in seconds of this process's clock, waiting for other ranks left out. `settle`
        waits until a device is done, so that these are times of the work and not of its launch.
        """
        mail = _P2PQueue(self.schedule, self._rank, orders, self._groups, make_buffer)
        last, spans = self.schedule.num_stages - 1, []
        for action in orders[self._rank]:
            stage, m = action.stage, action.microbatch
            forward = action.kind == "F"
            needs = action.kind != "W" and stage != (0 if forward else last)
            received = mail.receive(("F" if forward else "B", stage, m)) if needs else None
            begin = time.perf_counter()
            made = _run_action(action, stages[stage], received)
            if synchronize is not None:
                synchronize()
            spans.append(Span(self._rank, action, begin, time.perf_counter()))
            if made is not None:
                mail.send(("F", stage + 1, m) if forward else ("B", stage - 1, m), made)
        mail.wait_for_sends()
        return spans


def _run_action(action: Action, stage: Stage, received: Tensor | None) -> Tensor | None:
    if action.kind == "F":
        return stage.forward(action.microbatch, received)
    if action.kind == "W":
        stage.backward_weight(action.microbatch)
        return None
    return stage.backward(action.microbatch, received, split=action.kind == "I")


class _P2PQueue:
    """What this rank still has to send and to receive in one run of the orders.

    Everybody knows everybody's orders, so receives are posted in the order in which the other rank sends, one ahead.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        rank: int,
        orders: Sequence[PipelineOrder],
        groups: StageGroups,
        make_buffer: Callable[[], Tensor],
    ):
        self._schedule, self._rank, self._groups, self._make_buffer = schedule, rank, groups, make_buffer
        self._received: dict[Message, Tensor] = {}
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()
        sources = sorted(source for source, to in groups.groups if to == rank)
        self._expected_messages = {source: deque(self._list_messages(orders[source])) for source in sources}
        self._posted_receives: dict[int, tuple[Message, Tensor, dist.Work]] = {}
        for source in sources:
            self._post_receive(source)

    def receive(self, message: Message) -> Tensor:
        """Wait for a message."""
        kind, stage, _ = message
        source = self._schedule.get_rank_of_stage(stage - 1 if kind == "F" else stage + 1)
        while message not in self._received:
            arrived, tensor, work = self._posted_receives.pop(source)
            wait_all([work])
            self._received[arrived] = tensor
            self._post_receive(source)
        return self._received.pop(message)

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send a tensor to the stage it is for; where that is on this rank, it has arrived."""
        to = self._schedule.get_rank_of_stage(message[1])
        if to == self._rank:
            self._received[message] = tensor
            return
        while self._pending_sends and self._pending_sends[0][0].is_completed():
            self._pending_sends.popleft()
        group, sent = self._groups.groups[self._rank, to], tensor.contiguous()
        work = dist.isend(sent, self._groups.global_ranks[to], group)
        self._groups.traffic.elements += sent.numel()
        if work is not None:
            self._pending_sends.append((work, sent))

    def wait_for_sends(self) -> None:
        """Wait until everything is sent."""
        wait_all(work for work, _ in self._pending_sends)

    def _list_messages(self, order: PipelineOrder) -> Iterable[Message]:
        """What a rank with this order sends here, in its order."""
        last = self._schedule.num_stages - 1
        for action in order:
            if action.kind == "F" and action.stage < last:
                message = ("F", action.stage + 1, action.microbatch)
            elif action.kind in ("B", "I") and action.stage > 0:
                message = ("B", action.stage - 1, action.microbatch)
            else:
                continue
            if self._schedule.get_rank_of_stage(message[1]) == self._rank:
                yield message

    def _post_receive(self, source: int) -> None:
        if self._expected_messages[source]:
            message, tensor = self._expected_messages[source].popleft(), self._make_buffer()
            work = dist.irecv(tensor, self._groups.global_ranks[source], self._groups.groups[source, self._rank])
            if work is not None:
                self._posted_receives[source] = (message, tensor, work)
