"""Losses and gradient norms of data-parallel layouts equal those of one process."""

from __future__ import annotations

import pytest

from tests.training.data_parallel_parity import (
    LAYOUTS,
    LOSS_BOUND,
    NORM_BOUND,
    Curve,
    relative_difference,
    run_curve,
)
from tests.warm_pool import WarmPool

# Every degree and every sharding. `python -m tests.training.data_parallel_parity` runs all layouts in fp32 and
# fp64 for 50 steps.
FIRST = 10
CASES = [
    ("fp64", name) for name in ("ddp-2", "ddp-3", "zero1-5", "zero2-3", "zero2-4", "zero3-5", "hsdp1-2x2", "hsdp2-2x2")
]
CASES += [("fp32", name) for name in ("ddp-4", "ddp-5", "zero1-2", "zero2-5", "zero3-3", "hsdp3-2x2")]


@pytest.fixture(scope="module")
def single_process(pool: WarmPool) -> dict[str, Curve]:
    return {dtype: run_curve(pool, f"train.dtype={dtype}", first=FIRST) for dtype in LOSS_BOUND}


@pytest.mark.parametrize(("dtype", "layout"), CASES)
def test_layout_has_the_loss_curve_of_one_process(pool: WarmPool, single_process, layout: str, dtype: str) -> None:
    curve = run_curve(pool, f"train.dtype={dtype}", *LAYOUTS[layout], first=FIRST)
    loss, norm = relative_difference(curve, single_process[dtype])
    assert loss <= LOSS_BOUND[dtype]
    assert norm <= NORM_BOUND[dtype]
    assert curve[0][-1] != curve[0][0]


@pytest.mark.parametrize("dtype", LOSS_BOUND)
def test_gradient_accumulation_equals_one_large_microbatch(pool: WarmPool, single_process, dtype: str) -> None:
    loss, norm = relative_difference(
        run_curve(pool, f"train.dtype={dtype}", "train.micro_batch_size=12", first=FIRST), single_process[dtype]
    )
    assert loss <= LOSS_BOUND[dtype]
    assert norm <= NORM_BOUND[dtype]
