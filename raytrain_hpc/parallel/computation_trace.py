"""Trace of a microbatch: hashes of what a rank sends, receives and contributes while it computes the microbatch.

With `train.deterministic=elastic`, a microbatch has the same trace on all ranks with the same coordinates but for data
parallelism. If two traces differ, the kind of the first entry that differs tells where the fault is: a rank that
received what is right and then sent or contributed something wrong computed it wrong; a rank that received something
wrong did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from raytrain_hpc.parallel.reduction_order import PartitionedSum
from raytrain_hpc.parallel.sum_check import SumCheck
from raytrain_hpc.state.tensor_hash import compute_hash

EntryKind = Literal["sent", "received", "contributed"]


class Trace:
    """Hashes of the tensors of one microbatch on this rank. They stay on the device until they are read.

    What was communicated comes first, in order. Contributions follow, sorted by label: in the last passes of a step
    they are taken earlier than in others.
    """

    def __init__(self) -> None:
        self._communicated: list[tuple[EntryKind, str, Tensor]] = []
        self._contributed: list[tuple[EntryKind, str, Tensor]] = []

    def add(self, kind: EntryKind, label: str, tensor: Tensor) -> None:
        """Add a tensor. `label`: what it is, such as the names of the parameters whose gradients it holds."""
        self.add_hash(kind, label, compute_hash(tensor))

    def add_hash(self, kind: EntryKind, label: str, value: Tensor) -> None:
        """Add a tensor by its hash."""
        (self._contributed if kind == "contributed" else self._communicated).append((kind, label, value))

    def compute_total(self, device: torch.device) -> Tensor:
        """Return one hash of all hashes in order, an int64 scalar on the device; 0 if there are none."""
        hashes = [value.to(device) for _, _, value in self._sort()]
        return compute_hash(torch.stack(hashes)) if hashes else torch.zeros((), dtype=torch.int64, device=device)

    def to_entries(self) -> list[tuple[str, str, int]]:
        """Return kind, label and hash of each tensor. Waits for the device."""
        entries = self._sort()
        if not entries:
            return []
        device = entries[0][2].device  # all hashes in one copy to the host
        values: list[int] = torch.stack([value.to(device) for _, _, value in entries]).tolist()
        return [(kind, label, value) for (kind, label, _), value in zip(entries, values, strict=True)]

    def _sort(self) -> list[tuple[EntryKind, str, Tensor]]:
        return self._communicated + sorted(self._contributed, key=lambda entry: entry[1])


@dataclass(frozen=True)
class SumTrace:
    """Tracer of one slice of a sum of gradients. `label`: names the gradients."""

    trace: Trace
    label: str

    def add_sent(self, addends: Tensor) -> None:
        """Add the addends that this rank sends to others."""
        self.trace.add("sent", self.label, addends)

    def add_received(self, addends: Tensor) -> None:
        """Add the addends that this rank has received."""
        self.trace.add("received", self.label, addends)

    def add_sum(self, total: Tensor) -> None:
        """Add the sum that this rank has computed."""
        self.trace.add("contributed", self.label, total)


@dataclass(frozen=True)
class ShardTraces:
    """What a rank traces for a part of the state in an audited step: its own shard, and that of another rank.

    `shard_shift`: the other rank is this much further among those over which ZeRO shards the parameters. If they are
    not sharded, it can be `copy_shift` further among the ranks that hold the same. There is no other if both are 0.
    """

    shard_shift: int
    copy_shift: int = 0
    own: Trace = field(default_factory=Trace)
    other: Trace = field(default_factory=Trace)


class CounterTrace:
    """Tracer of what the passes of one microbatch add to counters, between those of other microbatches.

    `counters`: by label, integer tensors on this rank.
    """

    def __init__(self, counters: Mapping[str, Tensor]):
        self._counters = counters
        self._added = {label: torch.zeros_like(counter) for label, counter in counters.items()}
        self._before: dict[str, Tensor] = {}  # the counters, while passes of the microbatch run

    def enter(self) -> None:
        """Take note that passes of the microbatch run from now on."""
        self._before = {label: counter.clone() for label, counter in self._counters.items()}

    def leave(self) -> None:
        """Take note that passes of other microbatches run from now on."""
        for label, before in self._before.items():
            self._added[label] += self._counters[label] - before
        self._before = {}

    def add_to(self, trace: Trace) -> None:
        """Add what the microbatch has added to each counter."""
        self.leave()
        for label, added in self._added.items():
            trace.add("contributed", label, added)


class ComputationTracer:
    """Tracer of the microbatches that audits compare; shared by everything that communicates in the passes of a rank.

    A tensor is hashed only while a microbatch is traced. Each rank traces its own microbatch. With expert parallelism
    it also traces, by source, what its experts compute for the microbatches of the other ranks of its "ep" axis.
    """

    def __init__(self) -> None:
        self.drops_contributions = False  # whether passes leave no gradients
        self.audited_sums: Mapping[Any, ShardTraces] = {}  # of gradients, by kind of parameters; empty: not audited
        self._trace: Trace | None = None  # of this rank's microbatch
        self._expert_traces: list[Trace] = []  # by source
        self._slots: Sequence[int] = ()  # by source, the number of its traced microbatch
        self._own_source = 0
        self._current_slot: int | None = None
        self._counters = CounterTrace({})
        self._sum_checks: list[SumCheck] = []  # of the passes that were traced last

    @contextmanager
    def trace(
        self,
        slots: Sequence[int],
        own_source: int,
        *,
        drop: bool = False,
        sums: Mapping[Any, ShardTraces] | None = None,
        counters: Mapping[str, Tensor] | None = None,
    ) -> Iterator[list[Trace]]:
        """Trace one microbatch per source inside the context. Yields a trace of this rank's, then those of experts.

        `slots`: by source, a rank of the "ep" axis, the number of its traced microbatch. Without expert parallelism
        there is one source, this rank. `drop`: do not add the gradients of the passes to those of the step. `sums`:
        traces of the sums of gradients, by kind of parameters. `counters`: by label, tensors to which the passes of
        this rank add integers; what they add for its traced microbatch is contributed.
        """
        traces, self.audited_sums = [Trace() for _ in range(len(slots) + 1)], sums or {}
        self._trace, *self._expert_traces = traces
        self._slots, self._own_source, self.drops_contributions = slots, own_source, drop
        self._counters, self._sum_checks = CounterTrace(counters or {}), []
        try:
            yield traces
            self._counters.add_to(traces[0])
        finally:
            self._trace, self._expert_traces = None, []
            self._current_slot, self.drops_contributions, self.audited_sums = None, False, {}
            self._counters = CounterTrace({})

    def enter_microbatch(self, slot: int) -> None:
        """Take note that the passes of a microbatch of this rank run from now on. `slot`: its number on this rank."""
        self._counters.leave()
        self._current_slot = slot
        if self.is_traced(slot):
            self._counters.enter()

    def leave_microbatches(self) -> None:
        """Take note that what follows belongs to no microbatch: gradients of several are summed."""
        self._counters.leave()
        self._current_slot = None

    def make_sum_check(self, label: str) -> SumCheck:
        """Return a check of a sum of gradients of the traced passes. `label`: names what is summed."""
        self._sum_checks.append(SumCheck(label))
        return self._sum_checks[-1]

    def find_wrong_sum(self) -> str | None:
        """Return the label of the first checked sum of the last traced passes that is wrong; None if all are right."""
        return next((check.label for check in self._sum_checks if check.is_wrong()), None)

    def is_traced(self, slot: int, source: int | None = None) -> bool:
        """Return whether a microbatch of this rank is traced, or what its experts compute for one of a source."""
        if source is not None:
            return bool(self._expert_traces) and slot == self._slots[source]
        return self._trace is not None and slot == self._slots[self._own_source]

    def add(self, kind: EntryKind, label: str, tensor: Tensor, slot: int | None = None) -> None:
        """Add a tensor of a microbatch of this rank. `slot`: None stands for the current microbatch."""
        current = self._current_slot if slot is None else slot
        if self._trace is not None and current == self._slots[self._own_source]:
            self._trace.add(kind, label, tensor)

    def add_of_experts(self, kind: EntryKind, label: str, source: int, tensor: Tensor, slot: int | None = None) -> None:
        """Add what experts of this rank received, sent back or contributed for a microbatch of a source."""
        current = self._current_slot if slot is None else slot
        if self._expert_traces and current == self._slots[source]:
            self._expert_traces[source].add(kind, label, tensor)


@dataclass(frozen=True)
class SumTraces:
    """The traces of the sum of some gradients on a rank; see `ShardTraces`."""

    own: SumTrace
    other: SumTrace
    shard_shift: int
    copy_shift: int


@dataclass(frozen=True)
class ContributionTrace:
    """Tracer of the gradients of some parameters, by source. `of_experts`: there are as many sources as "ep" ranks.

    `label`: names all of them. `names`: of the parameters, in the order in which `add` gets their gradients.
    """

    tracer: ComputationTracer
    label: str
    names: tuple[str, ...]
    of_experts: bool = False

    @property
    def drops_contributions(self) -> bool:
        """Whether the gradients are not to be added to those of the step."""
        return self.tracer.drops_contributions

    @property
    def sum_traces(self) -> SumTraces | None:
        """The traces of the sum of the gradients over all microbatches; None if it is not audited."""
        sums = self.tracer.audited_sums.get("experts" if self.of_experts else "dense")
        if sums is None or self.drops_contributions:
            return None
        label = f"sum of {self.label}"
        return SumTraces(SumTrace(sums.own, label), SumTrace(sums.other, label), sums.shard_shift, sums.copy_shift)

    def check_additions(self, total: PartitionedSum) -> None:
        """Check the additions of this rank's gradients, if their sum is audited. Call before each one."""
        if self.sum_traces is not None and not total.is_checked:
            total.set_check(self.tracer.make_sum_check(f"partial sum of {self.label}"))

    def add(self, source: int, gradients: Iterable[Tensor | None], slot: int) -> None:
        """Add the gradient of each parameter for a microbatch of a source; None: it has none.

        Hashed one by one, they do not depend on how parameters are grouped or sharded. `slot`: the number of the
        microbatch among those of the source.
        """
        if not self.tracer.is_traced(slot, source if self.of_experts else None):
            return
        for name, gradient in zip(self.names, gradients, strict=True):
            if gradient is not None:
                self._add(describe_gradient(name), source, gradient, slot)

    def add_together(self, source: int, gradients: Tensor, slot: int) -> None:
        """Add the gradients of all parameters as one tensor. Then they depend on how parameters are sharded."""
        self._add(self.label, source, gradients, slot)

    def _add(self, label: str, source: int, gradient: Tensor, slot: int) -> None:
        if self.of_experts:
            self.tracer.add_of_experts("contributed", label, source, gradient, slot)
        else:
            self.tracer.add("contributed", label, gradient, slot)


def describe_gradient(name: str) -> str:
    """Return the label of the gradient of a parameter."""
    return f"gradient of {name}"


def describe_gradients(names: Sequence[str]) -> str:
    """Return the label of the gradients of some parameters, in the order of their names."""
    return describe_gradient(names[0]) if len(names) == 1 else f"gradients of {names[0]} to {names[-1]}"
