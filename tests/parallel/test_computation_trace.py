"""Traces of microbatches: their hash against one computed with integers of Python, and what is recorded when."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raytrain_hpc.parallel.computation_trace import ComputationTracer, Trace, compute_hash

GOLDEN_RATIO = 0x9E3779B97F4A7C15
CPU = torch.device("cpu")


def compute_expected_hash(tensor: Tensor) -> int:
    """Sum the 64-bit words of a tensor, word i with the odd weight of lane i modulo 512, modulo 2**64."""
    content = tensor.contiguous().numpy().tobytes()
    content += bytes(-len(content) % 8)
    words = [int.from_bytes(content[start : start + 8], "little") for start in range(0, len(content), 8)]
    total = sum(word * ((i % 512 + 1) * GOLDEN_RATIO | 1) for i, word in enumerate(words)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 3, 511, 512, 1025, 5000])
def test_hash_is_the_weighted_sum_of_words(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randint(0, 255, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)
    numbers = tensor if dtype != torch.bfloat16 else tensor.view(torch.int16)  # which NumPy has
    assert int(compute_hash(tensor)) == compute_expected_hash(numbers)


def test_hash_is_of_the_content_in_order_wherever_it_is_in_memory() -> None:
    tensor = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    shifted = torch.cat((torch.zeros(1), tensor.flatten()))[1:].view(7, 300)  # not aligned to words of 64 bits
    assert shifted.data_ptr() % 8
    assert compute_hash(shifted) == compute_hash(tensor) == compute_hash(tensor.t().contiguous().t())
    assert compute_hash(tensor.t()) != compute_hash(tensor)


def test_every_flipped_bit_changes_the_hash() -> None:
    tensor = torch.randn(1500, generator=torch.Generator().manual_seed(2))
    expected, bits = compute_hash(tensor), tensor.view(torch.int32)
    for position in (0, 1, 511, 1023, 1024, 1499):
        for bit in range(32):
            mask = 1 << bit if bit < 31 else -(1 << 31)
            bits[position] ^= mask
            assert compute_hash(tensor) != expected
            bits[position] ^= mask
    assert compute_hash(tensor) == expected


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
