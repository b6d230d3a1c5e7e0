"""A data-parallel layout is a performance choice: losses and norms are those of one process."""

from __future__ import annotations

import pytest

from tests.pool import WarmPool, small, steps_of

STEPS = 50
LAYOUTS = {
    **{f"ddp-{w}": [f"cluster.workers={w}"] for w in (2, 3, 4, 5)},
    **{f"zero{z}-{w}": [f"cluster.workers={w}", f"parallel.zero={z}"] for z in (1, 2, 3) for w in (2, 3, 4, 5)},
    **{
        f"hsdp{z}-2x2": ["cluster.workers=4", f"parallel.zero={z}", "parallel.dp_replicate=2", "parallel.dp_shard=2"]
        for z in (1, 2, 3)
    },
}
# Dropout on; 12 sequences in microbatches of one: five ranks get 2, 2, 3, 2, 3 of them.
BASE = ["model.dropout=0.1", "train.micro_batch=1", f"train.steps={STEPS}", "train.warmup=5", "train.lr=1e-3"]
BOUNDS = {"fp64": 1e-12, "fp32": 1e-6}


def curve(pool: WarmPool, *words: str) -> tuple[list[float], list[float]]:
    steps = steps_of(pool.train(small(None, *BASE, *words))[0])
    assert len(steps) == STEPS
    return [s["train/loss"] for s in steps], [s["train/grad_norm"] for s in steps]


def worst(mine: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, other, strict=True))


@pytest.fixture(scope="module")
def alone(pool: WarmPool) -> dict[str, tuple[list[float], list[float]]]:
    return {dtype: curve(pool, f"train.dtype={dtype}") for dtype in BOUNDS}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_curve_of_one_process(pool: WarmPool, alone, layout: str, dtype: str) -> None:
    losses, norms = curve(pool, f"train.dtype={dtype}", *LAYOUTS[layout])
    assert worst(losses, alone[dtype][0]) <= BOUNDS[dtype]
    assert worst(norms, alone[dtype][1]) <= 10 * BOUNDS[dtype]
    assert losses[-1] < losses[0]
