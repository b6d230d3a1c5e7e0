"""Pipeline parallelism: run the actions of a schedule and exchange activations and gradients between stages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.parallel.blocking_collectives import wait_all
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.mesh_axis import Traffic
from raytrain_hpc.planner.pipeline_schedule import Action, PipelineOrder, PipelineSchedule
from raytrain_hpc.planner.pipeline_timeline import Span

Message = tuple[str, int, int]  # (kind: "F" or "B", destination stage, microbatch)
Send = tuple[int, dist.Work, Tensor]  # (position of the action that uses it in the destination's order, transfer, data)


class Stage(Protocol):
    """A pipeline stage: some layers of the model, run for one microbatch at a time."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor | None:
        """Return the input of the next stage, from the output of the previous one; None at either end."""

    def backward(self, microbatch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        """Return the gradient of the stage's input from that of its output; None at either end.

        `split`: weight gradients may be deferred to `backward_weight`.
        """

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that a split backward pass has deferred."""


@dataclass(frozen=True)
class StageGroups:
    """The process groups of a rank with other pipeline ranks: one group of two ranks per direction.

    Separate groups, since NCCL serializes the transfers of one group.
    """

    groups: Mapping[tuple[int, int], dist.ProcessGroup]  # by (source, destination), pipeline ranks
    global_ranks: Sequence[int]  # global rank of each pipeline rank
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    tracer: ComputationTracer = field(default_factory=ComputationTracer, compare=False)


class Pipeline:
    """The executor of a schedule on pipeline rank `rank`."""

    def __init__(self, schedule: PipelineSchedule, rank: int, groups: StageGroups):
        self.schedule, self._rank, self._groups = schedule, rank, groups

    def run(
        self,
        orders: Sequence[PipelineOrder],
        stages: Mapping[int, Stage],
        make_buffer: Callable[[], Tensor],
        synchronize: Callable[[], None] | None = None,
    ) -> list[Span]:
        """Run the actions of this rank and return their time spans.

        `orders`: actions by pipeline rank. `stages`: local stages by number. `make_buffer`: creates an empty tensor of
        the shape and dtype that stages exchange. `synchronize`: waits for the device, so that spans measure execution
        instead of kernel launches. Spans are in seconds of this process's clock, without waiting for other ranks.
        """
        queue = _P2PQueue(self.schedule, self._rank, orders, self._groups, make_buffer)
        last_stage, spans = self.schedule.num_stages - 1, []
        for action in orders[self._rank]:
            stage, microbatch = action.stage, action.microbatch
            is_forward = action.kind == "F"
            needs_input = action.kind != "W" and stage != (0 if is_forward else last_stage)
            received = queue.receive(("F" if is_forward else "B", stage, microbatch)) if needs_input else None
            begin = time.perf_counter()
            output = _run_action(action, stages[stage], received)
            if synchronize is not None:
                synchronize()
            spans.append(Span(self._rank, action, begin, time.perf_counter()))
            if output is not None:
                queue.send(("F", stage + 1, microbatch) if is_forward else ("B", stage - 1, microbatch), output)
        queue.wait_for_sends()
        return spans


def _index_messages(order: PipelineOrder) -> dict[Message, int]:
    """Return the position of the action of a rank that uses a message, for those that could be sent to it."""
    return {
        ("F" if action.kind == "F" else "B", action.stage, action.microbatch): position
        for position, action in enumerate(order)
        if action.kind != "W"
    }


def _describe_message(message: Message) -> str:
    kind, stage, _ = message
    return f"input of stage {stage}" if kind == "F" else f"gradient of the output of stage {stage}"


def _run_action(action: Action, stage: Stage, received: Tensor | None) -> Tensor | None:
    if action.kind == "F":
        return stage.forward(action.microbatch, received)
    if action.kind == "W":
        stage.backward_weight(action.microbatch)
        return None
    return stage.backward(action.microbatch, received, split=action.kind == "I")


class _P2PQueue:
    """The point-to-point sends and receives of this rank in one run of the schedule.

    Receives are posted in the order in which the source rank sends, known from its actions, one ahead per source.
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
        self._pending_sends: dict[int, deque[Send]] = {q: deque() for p, q in groups.groups if p == rank}
        self._positions = {neighbor: _index_messages(orders[neighbor]) for neighbor in self._pending_sends}
        sources = sorted(source for source, destination in groups.groups if destination == rank)
        self._expected_messages = {source: deque(self._list_messages(orders[source])) for source in sources}
        self._posted_receives: dict[int, tuple[Message, Tensor, dist.Work]] = {}
        for source in sources:
            self._post_receive(source)

    def receive(self, message: Message) -> Tensor:
        """Wait for a message and return its tensor."""
        kind, stage, _ = message
        source = self._schedule.get_rank_of_stage(stage - 1 if kind == "F" else stage + 1)
        while message not in self._received:
            received_message, tensor, work = self._posted_receives.pop(source)
            wait_all([work])
            self._received[received_message] = tensor
            self._release_sends(source, received_message)
            self._post_receive(source)
        tensor = self._received.pop(message)
        if source != self._rank:  # here, not on arrival: the order does not depend on the other microbatches
            self._groups.tracer.add("received", _describe_message(message), tensor, message[2])
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Send a tensor to the rank of its destination stage, asynchronously; keep it if that is this rank."""
        destination = self._schedule.get_rank_of_stage(message[1])
        if destination == self._rank:
            self._received[message] = tensor
            return
        pending = self._pending_sends[destination]
        while pending and pending[0][1].is_completed():
            pending.popleft()
        group, send_buffer = self._groups.groups[self._rank, destination], tensor.contiguous()
        self._groups.tracer.add("sent", _describe_message(message), send_buffer, message[2])
        work = dist.isend(send_buffer, self._groups.global_ranks[destination], group)
        self._groups.traffic.elements += send_buffer.numel()
        if work is not None:
            pending.append((self._positions[destination][message], work, send_buffer))

    def wait_for_sends(self) -> None:
        """Wait until all sends have completed."""
        wait_all(work for pending in self._pending_sends.values() for _, work, _ in pending)

    def _release_sends(self, neighbor: int, message: Message) -> None:
        """Free what `neighbor` had received when it sent this message, which its order tells.

        With gloo, a send counts as completed only once it has been waited for: every buffer would stay until the end.
        """
        kind, stage, microbatch = message
        sent_at = self._positions[neighbor][kind, stage - 1 if kind == "F" else stage + 1, microbatch]
        pending = self._pending_sends[neighbor]
        # Messages are received in the order in which they are sent, and may be used in another.
        count = max((number for number, (used_at, _, _) in enumerate(pending, 1) if used_at <= sent_at), default=0)
        wait_all(pending.popleft()[1] for _ in range(count))

    def _list_messages(self, order: PipelineOrder) -> Iterable[Message]:
        """Yield the messages that a rank with these actions sends to this rank, in order."""
        last_stage = self._schedule.num_stages - 1
        for action in order:
            if action.kind == "F" and action.stage < last_stage:
                message = ("F", action.stage + 1, action.microbatch)
            elif action.kind in ("B", "I") and action.stage > 0:
                message = ("B", action.stage - 1, action.microbatch)
            else:
                continue
            if self._schedule.get_rank_of_stage(message[1]) == self._rank:
                yield message

    def _post_receive(self, source: int) -> None:
        if self._expected_messages[source]:
            message, buffer = self._expected_messages[source].popleft(), self._make_buffer()
            work = dist.irecv(buffer, self._groups.global_ranks[source], self._groups.groups[source, self._rank])
            if work is not None:
                self._posted_receives[source] = (message, buffer, work)
