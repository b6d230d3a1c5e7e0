"""Save checkpoints on one layout and resume on another: `python -m tests.parallel.reshard_checkpoints`.

Prints, for each pair, the largest relative difference of the next ten losses from those of one process.
"""

from __future__ import annotations

import sys
import tempfile

from tests.parallel.parity import BASE, MODELS, count_ranks
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

SAVED_AT, NEXT, BOUND = 5, 10, 1e-6
TP, RING, ULYSSES = ["parallel.tp=2"], ["parallel.cp=2"], ["parallel.cp=2", "parallel.ulysses=2"]
ZERO3, DP = ["parallel.zero=3", "parallel.dp_shard=2"], ["parallel.dp_replicate=2"]
HSDP = ["parallel.zero=2", "parallel.dp_shard=2", "parallel.dp_replicate=2"]
PP = ["parallel.pp=2"]
ZBV = [*PP, "parallel.pp_schedule=zbv"]
ZERO_BUBBLE = [*PP, "parallel.pp_schedule=interleaved_zero_bubble"]
EP = ["parallel.ep=2"]
PAIRS = [
    ("GPT-2", [*TP, *PP], [*ZERO3, *RING]),
    ("GPT-2", HSDP, [*TP, *ULYSSES]),
    ("GPT-2", ["parallel.tp=4"], [*DP, *ZBV]),
    ("GPT-2", [*ZERO3, *ZERO_BUBBLE], [*TP, *RING]),
    ("Llama", [*ZERO3, *TP], [*ZBV, *RING]),
    ("Llama", [*RING, *PP], ["parallel.tp=3"]),
    ("Llama", [*DP, *ULYSSES], [*ZERO3, *ZERO_BUBBLE]),
    ("Llama", ["parallel.pp=4"], HSDP),
    ("MoE", [*DP, *EP, *TP], [*ZERO3, *PP]),
    ("MoE", [*ZERO3, *PP], ["parallel.dp_replicate=4", "parallel.ep=4"]),
    ("MoE", [*RING, *EP, *PP], [*ZERO3, *TP]),
    ("MoE", ["parallel.zero=3", "parallel.dp_shard=4", *EP], [*TP, *RING]),
]


def train_losses(
    pool: WarmPool, words: list[str], *, directory: str | None = None, first: int = 0, to: int
) -> list[float]:
    """Train from step `first` to step `to` and save a checkpoint. Return the losses."""
    steps = SAVED_AT + NEXT
    config = make_small_config(
        directory, *BASE, f"train.steps={steps}", *words, f"cluster.workers={count_ranks(words)}"
    )
    return [s["train/loss"] for s in get_step_metrics(pool.train(config, resume_step=first or None, steps_to=to)[0])]


def compute_difference(
    pool: WarmPool, model: str, saved: list[str], continued: list[str], expected: list[float]
) -> float:
    """Save on one layout, resume on the other. Return the largest difference of the losses."""
    with tempfile.TemporaryDirectory() as directory:
        train_losses(pool, [*MODELS[model], *saved], directory=directory, to=SAVED_AT)
        resumed = train_losses(
            pool, [*MODELS[model], *continued], directory=directory, first=SAVED_AT, to=SAVED_AT + NEXT
        )
    return max(abs(a - b) / abs(b) for a, b in zip(resumed, expected[SAVED_AT:], strict=True))


def main() -> int:
    """Print one line per pair. Return the number of pairs that exceed the bound."""
    pool, baselines, num_failures = WarmPool(), {}, 0
    print("| model | saved on | continued on | next 10 losses |\n| --- | --- | --- | --- |", flush=True)
    for model, saved, continued in PAIRS:
        if model not in baselines:
            baselines[model] = train_losses(pool, MODELS[model], to=SAVED_AT + NEXT)
        error = compute_difference(pool, model, saved, continued, baselines[model])
        num_failures += error > BOUND
        names = [" ".join(word.removeprefix("parallel.") for word in layout) for layout in (saved, continued)]
        print(f"| {model} | {names[0]} | {names[1]} | {error:.1e}{' FAILS' if error > BOUND else ''} |", flush=True)
    pool.close()
    return num_failures


if __name__ == "__main__":
    sys.exit(main())
