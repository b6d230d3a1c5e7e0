"""Verdict on a mismatch of an audit: which computations were wrong, and on which ranks. Pure functions.

A microbatch has the same bits whichever data-parallel rank computes it, and so has an update of a shard of the state.
What two of them agree on is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.elastic.model_replicas import Place

# Kinds of failures: the state of a rank is wrong; it computes something wrong again when it is repeated; it is one of
# several that could; it and a spare disagree, and the run goes back to let other ranks decide.
CORRUPT, FAULTY_DEVICE, SUSPECTED, DISPUTED = "corrupt", "faulty device", "suspected", "disputed"
FaultKind = Literal["compute", "communication", "memory"]
Entry = tuple[str, str, int]  # (kind: sent, received or contributed; label; hash), see parallel/computation_trace.py


@dataclass(frozen=True)
class Computation:
    """One computation of a microbatch by a data-parallel rank, or of a shard of the state by one rank.

    `places`: of its traces, in the same order for all computations. `signature`: equal if all traces are equal.
    """

    executor: int
    places: tuple[Place, ...]
    signature: Hashable


@dataclass(frozen=True)
class Verdict:
    """The judgement of the computations of one microbatch or shard.

    `right`: number of one that is right, None: undecided. `wrong`: numbers of those that are wrong; undecided: of one
    by each data-parallel rank. `persistent`: the data-parallel ranks whose last computation was wrong too; undecided:
    all of them.
    """

    right: int | None
    wrong: tuple[int, ...]
    persistent: tuple[int, ...]


@dataclass(frozen=True)
class Finding:
    """A rank that is at fault. `subject`: what it computed, such as a microbatch; `tensor`: the first that differs.

    `kind`: compute, it computed something wrong from what it had received; communication, it received something else
    than others sent; memory, bits changed while nothing wrote to them. `is_certain`: it is known which of the ranks
    that disagree is wrong.
    """

    rank: int
    subject: str
    tensor: str
    kind: FaultKind
    is_persistent: bool
    is_certain: bool = True

    def __str__(self) -> str:
        """Return the finding as a phrase."""
        action = {"compute": "computed", "communication": "received", "memory": "kept"}[self.kind]
        wrong = "wrong" if self.is_certain else "wrong, or those that it was compared with,"
        repeated = "again when repeated" if self.is_persistent else "right when repeated"
        return f"rank {self.rank} {action} {self.subject} {wrong} ({self.tensor} first), {repeated}"


def judge(computations: Sequence[Computation]) -> Verdict:
    """Judge the computations of one microbatch or shard, which are not all equal, in the order they were made in.

    Right is what most data-parallel ranks have computed, if at least two have. If no two agree, one that computed the
    same twice is right, unless there are two such ranks: then it is undecided.
    """
    right, executors = _find_right_signature(computations), [computation.executor for computation in computations]
    if right is None:
        first = tuple(executors.index(executor) for executor in sorted(set(executors)))
        return Verdict(None, first, tuple(sorted(set(executors))))
    signatures = [computation.signature for computation in computations]
    wrong = tuple(number for number, signature in enumerate(signatures) if signature != right)
    last = dict(zip(executors, signatures, strict=True))
    persistent = tuple(executor for executor in sorted(last) if last[executor] != right)
    return Verdict(signatures.index(right), wrong, persistent)


def find_faults(
    subject: str, computations: Sequence[Computation], verdict: Verdict, traces: Sequence[Sequence[Sequence[Entry]]]
) -> list[Finding]:
    """Return the ranks at fault, by the traces of each computation of the subject in the order of its places."""
    findings, signatures = [], [computation.signature for computation in computations]
    for number in verdict.wrong:
        computation, other = computations[number], verdict.right
        if other is None:
            other = next(i for i, signature in enumerate(signatures) if signature != computation.signature)
        for place, tensor, kind in _find_origins(traces[other], traces[number]):
            is_persistent = computation.executor in verdict.persistent
            rank = computation.places[place][0]
            findings.append(Finding(rank, subject, tensor, kind, is_persistent, verdict.right is not None))
    return findings


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding per rank, in the order of ranks: a persistent one if there is one, else the first."""
    merged: dict[int, Finding] = {}
    for finding in findings:
        if finding.rank not in merged or (finding.is_persistent and not merged[finding.rank].is_persistent):
            merged[finding.rank] = finding
    return [merged[rank] for rank in sorted(merged)]


def choose_suspect(suspects: Sequence[int], suspected_before: Collection[int]) -> tuple[int, str]:
    """Return which of the ranks that disagree persistently to replace, and the kind of its failure.

    `suspected_before`: those whose process was a suspect already and was kept, while the other one was replaced.
    """
    guilty = [rank for rank in suspects if rank in suspected_before]
    return (guilty[0], FAULTY_DEVICE) if guilty else (max(suspects), SUSPECTED)


def find_first_difference(expected: Sequence[Entry], found: Sequence[Entry]) -> Entry | None:
    """Return the first entry of a trace that differs from what is expected; None if there is none."""
    index = _find_first_index(expected, found)
    return None if index is None else max(found, expected, key=len)[index]


def _find_origins(
    right: Sequence[Sequence[Entry]], wrong: Sequence[Sequence[Entry]]
) -> list[tuple[int, str, FaultKind]]:
    """Return (place, tensor, kind) where a computation first differs from a right one.

    A trace whose first difference was received did not cause it. If all were received, communication did, where
    something was received that no other rank has sent like that.
    """
    indexes = [_find_first_index(*traces) for traces in zip(right, wrong, strict=True)]
    longer = [max(traces, key=len) for traces in zip(wrong, right, strict=True)]
    found = {place: (longer[place], index) for place, index in enumerate(indexes) if index is not None}
    computed = [(place, trace[index][1]) for place, (trace, index) in found.items() if trace[index][0] != "received"]
    if computed:
        return [(place, label, "compute") for place, label in computed]
    sent = [_list_wrongly_sent(*traces) for traces in zip(right, wrong, strict=True)]
    received = {place: (trace[index][1], _count_before(trace, index)) for place, (trace, index) in found.items()}
    unexplained = [
        place
        for place, message in received.items()
        if not any(message in of_other for other, of_other in enumerate(sent) if other != place)
    ]
    return [(place, received[place][0], "communication") for place in unexplained or received]


def _list_wrongly_sent(expected: Sequence[Entry], found: Sequence[Entry]) -> set[tuple[str, int]]:
    """Return the messages that a rank has sent but that differ, by label and number among those of that label."""
    pairs = [(one, other) for one, other in zip(expected, found, strict=False) if one[0] == other[0] == "sent"]
    numbers, different = Counter[str](), set[tuple[str, int]]()
    for one, other in pairs:
        if one != other:
            different.add((other[1], numbers[other[1]]))
        numbers[other[1]] += 1
    return different


def _count_before(entries: Sequence[Entry], index: int) -> int:
    """Return how many messages of the same kind and label come before an entry."""
    return sum(other[:2] == entries[index][:2] for other in entries[:index])


def _find_first_index(expected: Sequence[Entry], found: Sequence[Entry]) -> int | None:
    """Return where two traces begin to differ; None if they are equal."""
    for index, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


def _find_right_signature(computations: Sequence[Computation]) -> Hashable | None:
    executors_by_signature: dict[Hashable, set[int]] = {}
    for computation in computations:
        executors_by_signature.setdefault(computation.signature, set()).add(computation.executor)
    support = {signature: len(executors) for signature, executors in executors_by_signature.items()}
    most = max(support.values())
    if most > 1:
        best = [signature for signature, count in support.items() if count == most]
        return best[0] if len(best) == 1 else None
    repeated = Counter((computation.executor, computation.signature) for computation in computations)
    stable = [signature for (_, signature), count in repeated.items() if count > 1]
    return stable[0] if len(stable) == 1 else None
