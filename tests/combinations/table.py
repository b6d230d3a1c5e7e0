"""The page docs/compatibility.md, generated from the results of random combinations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from tests.combinations.check import BOUND
from tests.combinations.draw import EXECUTION, MODELS, SCHEDULES, STEPS, TRAINING

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
DEFAULTS = {"even", "AdamW"}  # choices that are no features
AXES = ("tensor parallel", "context parallel", "Ulysses", "pipeline", *SCHEDULES, "expert parallel")
DATA_PARALLEL = ("replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP", "hierarchical partitioning", "tiles")
INTRODUCTION = """\
# What combines with what

Written by `python -m tests.combinations.table` from random combinations of all features: {versions}, gloo.

Each combination is a training job of {steps} steps with two executions, drawn from a seed. The first execution trains
half of the steps and saves; the second resumes with its own layout and features. The losses are compared with those of
one process that has none of the features of the executions, in fp32. Of {total} combinations, {equal} are equal within
{bound:g} (largest difference {worst:.1e}), {different} different, {broken} broken, {refused} refused. Seeds: {seeds}.
Compiled code was traced with its backward pass, and not translated to C++.

Each row: the number of executions with a feature, and the features that it was never executed together with, of those
that can be set together.

| feature | executions | never together with |
| --- | --- | --- |
"""
REFUSED = {
    ("`train.deterministic=elastic`", "`parallel.quantize=gradients`, `both`"): (
        "each rank rounds the sum of its own microbatches: the bits depend on the number of ranks"
    ),
    ("`train.deterministic=elastic`", "`parallel.quantize=weights` with `parallel.ep` above 1"): (
        "weights of experts are rounded where ranks that share them gather them: the bits depend on the number of ranks"
    ),
    ("`parallel.quantize`", "this comparison"): "rounding changes the losses on purpose; it has tests of its own",
    ("`parallel.offload`", "`optimizer.name=sgd`"): "there is no state to offload",
    ("`parallel.tile_mib`", "ZeRO below 3"): "nothing gathers weights layer by layer",
    ("cp, pp, ep", "models other than the built-in decoder"): (
        "positions, the order of layers and experts of other code are not known"
    ),
}
# Pairs that cannot be set together: choices of one setting, or a setting that needs another.
EXCLUSIVE = (
    set(MODELS),
    {"documents", "padded"},
    {"Muon", "SGD", "optimizer class", "parameter groups"},
    set(EXECUTION["recomputation"]),
    {"deterministic", "elastic"},
    {"offload", "offload to disk", "SGD"},
    set(SCHEDULES),
    {"replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3"},
    {"replicas", "HSDP"},
    {"HSDP", "hierarchical partitioning"},
    *(
        {zero, feature}
        for zero in ("replicas", "ZeRO-1", "ZeRO-2")
        for feature in ("hierarchical partitioning", "tiles")
    ),
    *({"expert parallel", model} for model in MODELS if "experts" not in model),
)


def list_features() -> list[str]:
    """Return all features in the order of the page."""
    settings = [choice for options in (*TRAINING.values(), *EXECUTION.values()) for choice in options]
    return [*MODELS, *AXES, *DATA_PARALLEL, *(c for c in settings if c.strip() and c not in DEFAULTS)]


def count_pairs(rows: Iterable[Mapping[str, Any]]) -> Counter[frozenset[str]]:
    """Count the executions with each feature, and with each pair of features, in combinations that are equal."""
    counts = Counter[frozenset[str]]()
    for row in rows:
        for features in row["features"] if row["kind"] == "equal" else ():
            counts.update(frozenset(pair) for size in (1, 2) for pair in combinations(features, size))
    return counts


def build_page(rows: Sequence[Mapping[str, Any]], versions: str) -> str:
    """Return the page. `rows`: results of all combinations."""
    kinds, counts, features = Counter(row["kind"] for row in rows), count_pairs(rows), list_features()
    equal = [row["difference"] for row in rows if row["kind"] == "equal"]
    page = INTRODUCTION.format(
        versions=versions,
        steps=STEPS,
        bound=BOUND,
        total=len(rows),
        worst=max(equal),
        seeds=", ".join(str(seed) for seed in sorted({row["seed"] for row in rows})),
        **{kind: kinds[kind] for kind in ("equal", "different", "broken", "refused")},
    )
    for feature in features:
        missing = [
            other
            for other in features
            if other != feature and not counts[frozenset((feature, other))] and not _are_exclusive(feature, other)
        ]
        page += f"| {feature} | {counts[frozenset((feature,))]} | {', '.join(missing) or '-'} |\n"
    page += "\n## Refused\n\n| setting | not with | reason |\n| --- | --- | --- |\n"
    return page + "".join(f"| {first} | {second} | {reason} |\n" for (first, second), reason in REFUSED.items())


def _are_exclusive(first: str, second: str) -> bool:
    return any(first in group and second in group for group in EXCLUSIVE)


def read_results(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the results that `python -m tests.combinations --results` has written."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def main() -> None:
    """Write the page from the results whose paths are the arguments."""
    import platform
    import sys

    import torch

    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    PAGE.write_text(build_page(read_results(Path(path) for path in sys.argv[1:]), versions))


if __name__ == "__main__":
    main()
