"""Audits of totals: of losses and tokens, and of the gradient norm, which all ranks add up in one all-reduce.

If an all-reduce is wrong on all ranks alike, they agree on what is wrong. In audited steps, each rank therefore also
gets what all ranks have contributed, and adds it up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.elastic.audit_verdict import Finding
from raytrain_hpc.training.memory_audits import gather_texts
from raytrain_hpc.training.pass_audits import AuditMismatchError, ReportFinding

T = TypeVar("T")


class TotalAudits:
    """Auditor of totals on one rank. `report`: takes transient faults, which all ranks find alike."""

    def __init__(self, context: ParallelContext, raise_if_aborted: Callable[[], None], report: ReportFinding):
        self._context, self._raise_if_aborted, self._report = context, raise_if_aborted, report

    def compute(
        self, step: int, subject: str, add_up: Callable[[], T], is_right: Callable[[T], bool], ranks: Sequence[int]
    ) -> T:
        """Return the total that `add_up` computes, once more if it is wrong on a rank. Collective over all ranks.

        `is_right`: whether a total is the sum of what `ranks` have contributed. All ranks call this, each with those
        whose contributions are in its total. Raises AuditMismatchError on all ranks if a total is wrong again: the
        ranks where it is are at fault, or if all that have added it up agree on it, any of them could be.
        """
        began, total = time.time(), add_up()
        wrong = self._find_wrong(is_right(total), ranks)
        if not wrong:
            return total
        total = add_up()
        repeated = self._find_wrong(is_right(total), ranks)
        findings = [
            Finding(rank, subject, "the sum over ranks", "communication", bool(repeated), not set(peers) <= set(found))
            for found in [repeated or wrong]
            for rank, peers in found.items()
        ]
        if repeated:
            raise AuditMismatchError(step, findings)
        for finding in findings:
            self._report(step, finding, began)
        return total

    def _find_wrong(self, is_right: bool, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Return the ranks on which a total is wrong, with those that have contributed to it."""
        texts = gather_texts(None if is_right else json.dumps(list(ranks)), self._context)
        self._raise_if_aborted()
        return {rank: json.loads(peers) for rank, peers in texts.items()}
