"""Verdicts on mismatches: who is right, whether the fault repeats, and where a wrong computation first differed."""

from __future__ import annotations

import pytest

from raytrain_hpc.elastic.audit_verdict import (
    Computation,
    Entry,
    Finding,
    Verdict,
    choose_suspect,
    find_faults,
    judge,
    merge_findings,
)


def make(*computations: str) -> list[Computation]:
    """Build computations from "<executor><signature>"; executor e is rank 10 e."""
    return [Computation(int(text[0]), ((10 * int(text[0]), 0),), text[1:]) for text in computations]


@pytest.mark.parametrize(
    ("computations", "expected"),
    [
        (["0x", "1a", "0a", "1a", "2a"], Verdict(1, (0,), ())),  # the owner, once
        (["0x", "1a", "0x", "1a", "2a"], Verdict(1, (0, 2), (0,))),  # the owner, again
        (["0x", "1a", "0y", "1a", "2a"], Verdict(1, (0, 2), (0,))),  # another error each time
        (["0a", "1x", "0a", "1a", "2a"], Verdict(0, (1,), ())),  # the auditor, once
        (["0a", "1x", "0a", "1x", "2a"], Verdict(0, (1, 3), (1,))),
        (["0a", "1x", "0a", "1a", "2x"], None),  # two ranks agree on each of two results
        (["0x", "1a", "0a", "1a"], Verdict(1, (0,), ())),  # no third rank
        (["0x", "1a", "0y", "1a"], Verdict(1, (0, 2), (0,))),  # only one rank repeats its result
        (["0x", "1a", "0x", "1a"], Verdict(None, (0, 1), (0, 1))),  # both repeat theirs
        (["0x", "1y", "0z", "1w"], Verdict(None, (0, 1), (0, 1))),
        (["0x", "0a", "0a", "0a"], Verdict(1, (0,), ())),  # a single rank
        (["0a", "0x", "0a", "0x"], Verdict(None, (0,), (0,))),
        (["0a", "1x", "0y", "1a", "2z"], Verdict(0, (1, 2, 4), (0, 2))),  # right is what two agree on
    ],
)
def test_what_two_ranks_agree_on_is_right(computations: list[str], expected: Verdict | None) -> None:
    verdict = judge(make(*computations))
    assert verdict == (expected or Verdict(None, (0, 1, 4), (0, 1, 2)))


def entries(*texts: str) -> list[Entry]:
    """Build the entries of a trace from "<kind's first letter><label><hash>"."""
    kinds = {"s": "sent", "r": "received", "c": "contributed"}
    return [(kinds[text[0]], text[1], int(text[2:])) for text in texts]


def find(right: list[list[Entry]], wrong: list[list[Entry]], *, repeats: bool = False) -> list[tuple[int, str, str]]:
    places = tuple((rank, 0) for rank in range(len(right)))
    moved = tuple((10 + rank, 0) for rank in range(len(right)))
    computations = [Computation(1, moved, "wrong"), Computation(0, places, "right"), Computation(2, places, "right")]
    verdict = Verdict(1, (0,), (1,) if repeats else ())
    findings = find_faults("microbatch 5", computations, verdict, [wrong, right, right])
    assert all(finding.subject == "microbatch 5" and finding.is_persistent == repeats for finding in findings)
    return [(finding.rank, finding.tensor, finding.kind) for finding in findings]


def test_the_rank_that_sent_something_wrong_first_is_named() -> None:
    """Two tensor-parallel ranks: one sends a wrong addend, and both receive the wrong sum and go on with it."""
    right = [entries("sa1", "rb2", "sc3", "cd4"), entries("sa5", "rb2", "sc6", "cd7")]
    wrong = [entries("sa1", "rb9", "sc8", "cd8"), entries("sa9", "rb9", "sc9", "cd9")]
    assert find(right, wrong) == [(11, "a", "compute")]
    assert find(right, wrong, repeats=True) == [(11, "a", "compute")]


def test_a_wrong_contribution_of_right_inputs_is_computed_wrong() -> None:
    right, wrong = [entries("sa1", "rb2", "cd4")], [entries("sa1", "rb2", "cd5")]
    assert find(right, wrong) == [(10, "d", "compute")]


def test_something_received_that_nobody_sent_is_a_fault_of_communication() -> None:
    right = [entries("sa1", "rb2", "cd4"), entries("sa5", "rb2", "cd7")]
    wrong = [entries("sa1", "rb3", "cd9"), entries("sa5", "rb2", "cd7")]
    assert find(right, wrong) == [(10, "b", "communication")]


def test_a_missing_tensor_is_a_difference() -> None:
    assert find([entries("sa1", "sb2")], [entries("sa1")]) == [(10, "b", "compute")]
    assert find([entries("sa1")], [entries("sa1", "sb2")]) == [(10, "b", "compute")]


def test_both_are_named_if_it_is_undecided() -> None:
    computations = make("0x", "1a", "0x", "1a")
    traces = [[entries("ca1")], [entries("ca2")], [entries("ca1")], [entries("ca2")]]
    findings = find_faults(3, computations, judge(computations), traces)
    assert [(finding.rank, finding.is_persistent, finding.is_certain) for finding in findings] == [
        (0, True, False),
        (10, True, False),
    ]


def test_a_rank_that_disagrees_with_another_process_again_is_at_fault() -> None:
    assert choose_suspect([1, 3], []) == (3, "suspected")
    assert choose_suspect([1, 3], [1]) == (1, "faulty device")
    assert choose_suspect([0], []) == (0, "suspected")


def test_a_single_rank_that_never_repeats_its_result_is_named() -> None:
    computations = make("0w", "0x", "0y", "0z")
    traces = [[entries("sa1", f"cb{number}")] for number in range(4)]
    (finding,) = find_faults(3, computations, judge(computations), traces)
    assert (finding.rank, finding.tensor, finding.is_persistent, finding.is_certain) == (0, "b", True, False)


def test_one_finding_per_rank_remains_a_persistent_one_first() -> None:
    once = Finding(3, "microbatch 1", "a", "compute", is_persistent=False)
    again = Finding(3, "microbatch 2", "b", "compute", is_persistent=True)
    other = Finding(1, "microbatch 2", "b", "compute", is_persistent=False)
    assert merge_findings([once, other, again, once]) == [other, again]
    assert str(again) == "rank 3 computed microbatch 2 wrong (b first), again when repeated"
