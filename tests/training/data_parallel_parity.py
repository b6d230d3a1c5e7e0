"""Table of data-parallel layouts compared with one process: `python -m tests.training.data_parallel_parity`."""

from __future__ import annotations

from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 50
LAYOUTS = {
    **{f"ddp-{w}": [f"cluster.workers={w}"] for w in (2, 3, 4, 5)},
    **{f"zero{z}-{w}": [f"cluster.workers={w}", f"parallel.zero={z}"] for z in (1, 2, 3) for w in (2, 3, 4, 5)},
    **{
        f"hsdp{z}-2x2": ["cluster.workers=4", f"parallel.zero={z}", "parallel.dp_replicate=2", "parallel.dp_shard=2"]
        for z in (1, 2, 3)
    },
}
# Dropout on; 12 sequences in 6 microbatches of two: five ranks get 1, 1, 1, 1, 2 of them, four 1, 2, 1, 2.
BASE = [
    "model.dropout=0.1",
    "train.micro_batch_size=2",
    f"train.steps={STEPS}",
    "lr_scheduler.warmup_steps=5",
    "optimizer.lr=1e-3",
]
LOSS_BOUND = {"fp64": 1e-12, "fp32": 1e-6}
NORM_BOUND = {dtype: 10 * bound for dtype, bound in LOSS_BOUND.items()}

Curve = tuple[list[float], list[float]]


def run_curve(pool: WarmPool, *overrides: str, first: int = STEPS) -> Curve:
    """Return losses and gradient norms of the first steps of a run with BASE and these overrides."""
    steps = get_step_metrics(pool.train(make_small_config(None, *BASE, *overrides), steps_to=first)[0])
    if len(steps) != first:
        raise RuntimeError(f"{len(steps)} steps, not {first}")
    return [s["train/loss"] for s in steps], [s["train/grad_norm"] for s in steps]


def relative_difference(curve: Curve, reference: Curve) -> tuple[float, float]:
    """Return the largest relative differences of losses and of norms."""
    loss, norm = (
        max(abs(a - b) / abs(b) for a, b in zip(xs, ys, strict=True)) for xs, ys in zip(curve, reference, strict=True)
    )
    return loss, norm


def main() -> None:
    """Compare every layout in both dtypes, and gradient accumulation with one large microbatch."""
    pool = WarmPool()
    for dtype in LOSS_BOUND:
        reference = run_curve(pool, f"train.dtype={dtype}")
        difference = relative_difference(
            run_curve(pool, f"train.dtype={dtype}", "train.micro_batch_size=12"), reference
        )
        print(
            f"{dtype}  1 microbatch of 12, not 6 of 2   loss {difference[0]:.1e}  norm {difference[1]:.1e}", flush=True
        )
        for name, overrides in LAYOUTS.items():
            loss, norm = relative_difference(run_curve(pool, f"train.dtype={dtype}", *overrides), reference)
            is_within_bounds = loss <= LOSS_BOUND[dtype] and norm <= NORM_BOUND[dtype]
            print(
                f"{dtype}  {name:12s}  loss {loss:.1e}  norm {norm:.1e}  {'ok' if is_within_bounds else 'FAILS'}",
                flush=True,
            )
    pool.close()


if __name__ == "__main__":
    main()
