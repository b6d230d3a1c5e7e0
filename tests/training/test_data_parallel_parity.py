"""A data-parallel layout is a performance choice: losses and norms are those of one process."""

from __future__ import annotations

import pytest

from tests.training.data_parallel_parity import LAYOUTS, LOSS_BOUND, NORM_BOUND, Curve, curve, distance
from tests.warm_pool import WarmPool

# Every degree and every way to shard. `python -m tests.training.data_parallel_parity` runs all layouts in fp32 and
# fp64 for 50 steps.
FIRST = 10
CASES = [
    ("fp64", name) for name in ("ddp-2", "ddp-3", "zero1-5", "zero2-3", "zero2-4", "zero3-5", "hsdp1-2x2", "hsdp2-2x2")
]
CASES += [("fp32", name) for name in ("ddp-4", "ddp-5", "zero1-2", "zero2-5", "zero3-3", "hsdp3-2x2")]


@pytest.fixture(scope="module")
def alone(pool: WarmPool) -> dict[str, Curve]:
    return {dtype: curve(pool, f"train.dtype={dtype}", first=FIRST) for dtype in LOSS_BOUND}


@pytest.mark.parametrize(("dtype", "layout"), CASES)
def test_layout_gives_the_curve_of_one_process(pool: WarmPool, alone, layout: str, dtype: str) -> None:
    mine = curve(pool, f"train.dtype={dtype}", *LAYOUTS[layout], first=FIRST)
    loss, norm = distance(mine, alone[dtype])
    assert loss <= LOSS_BOUND[dtype]
    assert norm <= NORM_BOUND[dtype]
    assert mine[0][-1] != mine[0][0]


@pytest.mark.parametrize("dtype", LOSS_BOUND)
def test_accumulation_equals_the_large_batch(pool: WarmPool, alone, dtype: str) -> None:
    loss, norm = distance(curve(pool, f"train.dtype={dtype}", "train.micro_batch=12", first=FIRST), alone[dtype])
    assert loss <= LOSS_BOUND[dtype]
    assert norm <= NORM_BOUND[dtype]
