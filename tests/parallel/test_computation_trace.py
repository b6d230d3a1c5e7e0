"""Traces of microbatches: what is recorded when."""

from __future__ import annotations

import torch

from raytrain_hpc.parallel.computation_trace import ComputationTracer, Trace
from raytrain_hpc.state.tensor_hash import compute_hash

CPU = torch.device("cpu")


def test_only_the_traced_microbatch_is_recorded() -> None:
    tracer, value = ComputationTracer(), torch.ones(3)
    tracer.enter_microbatch(1)
    tracer.add("sent", "before", value)
    with tracer.trace([1, 0], own_source=0) as (own, of_source_0, of_source_1):
        for slot in (0, 1, 2):
            tracer.enter_microbatch(slot)
            tracer.add("sent", f"in {slot}", value)
            tracer.add("received", f"of 1 in {slot}", value, slot=1)
            tracer.add_of_experts("sent", f"experts in {slot}", 1, value)
        tracer.leave_microbatches()
        tracer.add("sent", "sum over microbatches", value)
    tracer.add("sent", "after", value)
    assert [label for _, label, _ in own.to_entries()] == ["of 1 in 0", "in 1", "of 1 in 1", "of 1 in 2"]
    assert [label for _, label, _ in of_source_1.to_entries()] == ["experts in 0"]
    assert of_source_0.to_entries() == [] and int(of_source_0.compute_total(CPU)) == 0


def test_what_a_microbatch_adds_to_a_counter_is_contributed() -> None:
    """In several passes, between those of others."""
    tracer, counter = ComputationTracer(), torch.tensor([5, 7])
    with tracer.trace([1], own_source=0, counters={"load": counter}) as (own, _):
        for slot, added in ((0, [100, 0]), (1, [1, 2]), (0, [0, 100]), (1, [10, 20]), (1, [0, 1])):
            tracer.enter_microbatch(slot)
            counter += torch.tensor(added)
        tracer.leave_microbatches()
        counter += 1000
    assert own.to_entries() == [("contributed", "load", int(compute_hash(torch.tensor([11, 23]))))]


def test_total_depends_on_the_order_of_what_is_communicated_but_not_of_contributions() -> None:
    values = {name: torch.tensor([number]) for number, name in enumerate("abcd", 1)}

    def compute_total(sent: str, contributed: str) -> int:
        trace = Trace()
        for name in contributed:
            trace.add("contributed", name, values[name])
        for name in sent:
            trace.add("sent", "", values[name])
        return int(trace.compute_total(CPU))

    assert compute_total("ab", "cd") == compute_total("ab", "dc") != compute_total("ba", "cd")
    assert compute_total("ab", "c") not in (compute_total("ab", "cd"), compute_total("abd", "c"))
