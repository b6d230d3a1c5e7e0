"""Verdict on an audit by spares: whether they agree with the ranks, and after a disagreement who was wrong.

Pure functions. A spare alone cannot tell: it and the ranks are two parties. Unless another spare agrees with the ranks,
the run then goes back to a state from before the step, its next step is audited by ranks, and the audited step is
computed again by both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.elastic.audit_verdict import Computation, Entry, Finding, Verdict, find_faults
from raytrain_hpc.elastic.spare_audit_schedule import SpareAudit

UnitTraces = Sequence[Sequence[Sequence[Entry]]]  # by rank of the unit, then by trace
Party = Literal["ranks", "spares"]


@dataclass(frozen=True)
class Disagreement:
    """Spares and ranks have computed a microbatch differently, the spares twice alike. Traces: of both."""

    audit: SpareAudit
    of_ranks: UnitTraces
    of_spares: UnitTraces


def find_differences(audit: SpareAudit, right: UnitTraces, wrong: UnitTraces, party: Party) -> list[Finding]:
    """Return which members of a party have computed something else than the other party; none if all is equal.

    `right`: traces of the other party. A finding names a rank, or of spares the position among them. Gradients that
    only one party has traced one by one are not compared.
    """
    places = [(member, trace) for member, of_member in enumerate(right) for trace in range(len(of_member))]
    pairs = [_select_common(right[member][trace], wrong[member][trace]) for member, trace in places]
    if all(one == other for one, other in pairs):
        return []
    named = tuple((audit.ranks[member] if party == "ranks" else member, trace) for member, trace in places)
    computations = [Computation(executor, named, executor) for executor in (0, 1)]
    subject = f"microbatch {' and '.join(map(str, audit.microbatches))} of step {audit.step + 1}"
    by_computation = [[one for one, _ in pairs], [other for _, other in pairs]]
    return find_faults(subject, computations, Verdict(0, (1,), ()), by_computation)


def settle(disagreement: Disagreement, audit: SpareAudit, of_ranks: UnitTraces) -> Party | None:
    """Return who was wrong in a disagreement, by what ranks compute now of the same step; None if it is another one.

    The state before the step and the process of a rank can be others now, but not what is right.
    """
    if audit != disagreement.audit:
        return None
    return "spares" if find_differences(audit, disagreement.of_spares, of_ranks, "ranks") else "ranks"


def _select_common(one: Sequence[Entry], other: Sequence[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return two traces without the gradients that are in one of them only: in groups of others, say."""
    labels = {label for _, label, _ in one} & {label for _, label, _ in other}
    selected = [[entry for entry in trace if entry[0] != "contributed" or entry[1] in labels] for trace in (one, other)]
    return selected[0], selected[1]
