"""Check of sums of gradients: additions and partial sums that are wrong are noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from raytrain_hpc.parallel import sum_check
from raytrain_hpc.parallel.reduction_order import PartitionedSum
from raytrain_hpc.parallel.sum_check import SumCheck
from raytrain_hpc.runtime.bit_flips import flip_bit

NUM_LEAVES = 6


def make_sum(num_parts: int = 1) -> tuple[PartitionedSum, SumCheck]:
    total, check = PartitionedSum(NUM_LEAVES, num_parts), SumCheck("gradients")
    total.set_check(check)
    return total, check


def make_values(num_elements: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(num_elements, generator=generator) for _ in range(NUM_LEAVES)]


@pytest.mark.parametrize("num_elements", [1, 7, 24, 25])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_right_sums_are_right(monkeypatch: pytest.MonkeyPatch, num_elements: int, num_parts: int) -> None:
    """Also in several pieces, with odd sizes, and with memory that is used again."""
    monkeypatch.setattr(sum_check, "_PIECE_ELEMENTS", 8)
    total, check = make_sum(num_parts)
    plain = PartitionedSum(NUM_LEAVES, num_parts)
    free: list[Tensor] = []
    for leaf, value in enumerate(make_values(num_elements)):
        for part in range(num_parts):
            memory = free.pop() if free else torch.empty(num_elements)
            free += total.add(memory.copy_(value), (part, (0, leaf)))
            plain.add(value.clone(), (part, (0, leaf)))
    total.verify_nodes()
    assert not check.is_wrong()
    assert torch.equal(total.compute_total(), plain.compute_total())


@pytest.mark.parametrize("bit", [0, 31])
@pytest.mark.parametrize("after_leaf", range(NUM_LEAVES))
def test_a_bit_of_a_partial_sum_that_changes_is_found(after_leaf: int, bit: int) -> None:
    total, check = make_sum()
    for leaf, value in enumerate(make_values(24)):
        total.add(value, (0, (0, leaf)))
        if leaf == after_leaf:
            flip_bit(next(iter(total.open_nodes.values())), bit)
    total.verify_nodes()
    assert check.is_wrong()


def test_a_wrong_addition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    total, check = make_sum()
    add, num_calls = torch.Tensor.add_, 0

    def add_wrong(left: Tensor, right: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        result = add(left, right)
        if num_calls == 2:
            flip_bit(result, 3)
        return result

    monkeypatch.setattr(torch.Tensor, "add_", add_wrong)
    for leaf, value in enumerate(make_values(24)):
        total.add(value, (0, (0, leaf)))
    total.verify_nodes()
    assert num_calls == NUM_LEAVES - 1 and check.is_wrong()


def test_nothing_is_wrong_before_the_first_addition() -> None:
    total, check = make_sum()
    total.verify_nodes()
    assert not check.is_wrong()
