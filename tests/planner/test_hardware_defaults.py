"""What GPUs can do, by their compute capability."""

from __future__ import annotations

import pytest

from raytrain_hpc.planner.hardware_defaults import has_grouped_mm


@pytest.mark.parametrize(
    ("capability", "is_rocm", "expected"),
    [((8, 9), False, False), ((9, 0), False, True), ((10, 0), False, True), ((9, 4), True, False)],
)
def test_gpus_from_hopper_on_multiply_groups_in_one_kernel(
    capability: tuple[int, int], is_rocm: bool, expected: bool
) -> None:
    assert has_grouped_mm(capability, is_rocm=is_rocm) is expected
