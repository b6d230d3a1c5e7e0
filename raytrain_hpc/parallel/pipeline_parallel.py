"""Pipeline parallelism: a rank carries out its actions, and neighbouring stages hand on what they made."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.parallel.blocking_collectives import wait
from raytrain_hpc.parallel.mesh_axis import Traffic
from raytrain_hpc.planner.pipeline_schedule import Action, Order, Schedule
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

    def weights(self, microbatch: int) -> None:
        """Compute the gradients of weights that a split backward pass left."""


@dataclass(frozen=True)
class Links:
    """A rank's connections: for each direction to or from another rank of the pipeline a group of the two.

    One group a direction, since on NCCL whatever goes through one group goes one after the other.
    """

    groups: Mapping[tuple[int, int], dist.ProcessGroup]  # (from, to), pipeline ranks
    ranks: Sequence[int]  # pipeline rank -> rank in the world
    traffic: Traffic = field(default_factory=Traffic, compare=False)


class Pipeline:
    """Pipeline rank `rank` of a schedule."""

    def __init__(self, schedule: Schedule, rank: int, links: Links):
        self.schedule, self._rank, self._links = schedule, rank, links

    def run(
        self,
        orders: Sequence[Order],
        stages: Mapping[int, Stage],
        buffer: Callable[[], Tensor],
        settle: Callable[[], None] | None = None,
    ) -> list[Span]:
        """Do what the orders say for this rank. `buffer` makes an empty tensor like those that stages exchange.

        Returns when each action ran, in seconds of this process's clock, waiting for other ranks left out. `settle`
        waits until a device is done, so that these are times of the work and not of its launch.
        """
        mail = _Mail(self.schedule, self._rank, orders, self._links, buffer)
        last, spans = self.schedule.stages - 1, []
        for action in orders[self._rank]:
            stage, m = action.stage, action.microbatch
            forward = action.kind == "F"
            needs = action.kind != "W" and stage != (0 if forward else last)
            received = mail.take(("F" if forward else "B", stage, m)) if needs else None
            begin = time.perf_counter()
            made = _do(action, stages[stage], received)
            if settle is not None:
                settle()
            spans.append(Span(self._rank, action, begin, time.perf_counter()))
            if made is not None:
                mail.deliver(("F", stage + 1, m) if forward else ("B", stage - 1, m), made)
        mail.close()
        return spans


def _do(action: Action, stage: Stage, received: Tensor | None) -> Tensor | None:
    if action.kind == "F":
        return stage.forward(action.microbatch, received)
    if action.kind == "W":
        stage.weights(action.microbatch)
        return None
    return stage.backward(action.microbatch, received, split=action.kind == "I")


class _Mail:
    """What this rank still has to send and to receive in one run of the orders.

    Everybody knows everybody's orders, so receives are posted in the order in which the other rank sends, one ahead.
    """

    def __init__(
        self, schedule: Schedule, rank: int, orders: Sequence[Order], links: Links, buffer: Callable[[], Tensor]
    ):
        self._schedule, self._rank, self._links, self._buffer = schedule, rank, links, buffer
        self._arrived: dict[Message, Tensor] = {}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        sources = sorted(source for source, to in links.groups if to == rank)
        self._expected = {source: deque(self._from(orders[source])) for source in sources}
        self._posted: dict[int, tuple[Message, Tensor, dist.Work]] = {}
        for source in sources:
            self._post(source)

    def take(self, message: Message) -> Tensor:
        """Wait for a message."""
        kind, stage, _ = message
        source = self._schedule.rank_of(stage - 1 if kind == "F" else stage + 1)
        while message not in self._arrived:
            arrived, tensor, work = self._posted.pop(source)
            wait([work])
            self._arrived[arrived] = tensor
            self._post(source)
        return self._arrived.pop(message)

    def deliver(self, message: Message, tensor: Tensor) -> None:
        """Send a tensor to the stage it is for; where that is on this rank, it has arrived."""
        to = self._schedule.rank_of(message[1])
        if to == self._rank:
            self._arrived[message] = tensor
            return
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        group, sent = self._links.groups[self._rank, to], tensor.contiguous()
        work = dist.isend(sent, self._links.ranks[to], group)
        self._links.traffic.elements += sent.numel()
        if work is not None:
            self._sent.append((work, sent))

    def close(self) -> None:
        """Wait until everything is sent."""
        wait(work for work, _ in self._sent)

    def _from(self, order: Order) -> Iterable[Message]:
        """What a rank with this order sends here, in its order."""
        last = self._schedule.stages - 1
        for action in order:
            if action.kind == "F" and action.stage < last:
                message = ("F", action.stage + 1, action.microbatch)
            elif action.kind in ("B", "I") and action.stage > 0:
                message = ("B", action.stage - 1, action.microbatch)
            else:
                continue
            if self._schedule.rank_of(message[1]) == self._rank:
                yield message

    def _post(self, source: int) -> None:
        if self._expected[source]:
            message, tensor = self._expected[source].popleft(), self._buffer()
            work = dist.irecv(tensor, self._links.ranks[source], self._links.groups[source, self._rank])
            if work is not None:
                self._posted[source] = (message, tensor, work)
