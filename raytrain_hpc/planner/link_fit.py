"""Latency and bandwidth of a link, out of how long messages of several sizes took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# What a collective of n bytes sends from a rank to its neighbour, of p ranks in a ring; and in how many rounds.
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "reduce": lambda p: 1.0,
    "broadcast": lambda p: 1.0,
    "all_gather": lambda p: (p - 1) / p,
    "scatter": lambda p: (p - 1) / p,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "send": lambda p: 1.0,
}


@dataclass(frozen=True)
class CollectiveTimings:
    """How long collectives took among some workers. `scope`: inside a node, across nodes (one of each), or all.

    `seconds[operation][bytes]`: the slowest rank's, median over rounds.
    """

    scope: str
    ranks: int
    nodes: int
    seconds: Mapping[str, Mapping[int, float]] = field(repr=False)


@dataclass(frozen=True)
class LinkFit:
    """alpha + n / beta: `alpha_s` seconds of an empty one, and bytes a second beyond that, in GB/s of bus bandwidth.

    `error`: the largest relative difference to what was measured.
    """

    alpha_s: float
    gbs: float
    error: float


def fit_operations(timings: CollectiveTimings) -> dict[str, LinkFit]:
    """A line for each operation."""
    return {name: fit_link(name, timings.ranks, seconds) for name, seconds in timings.seconds.items()}


def compute_bus_gbs(operation: str, ranks: int, size: float, seconds: float) -> float:
    """Bus bandwidth in GB/s: of the bytes that have to pass each rank's link (nccl-tests, PERFORMANCE.md)."""
    return BUS_FACTORS[operation](ranks) * size / seconds / 1e9


def fit_link(operation: str, ranks: int, seconds: Mapping[int, float]) -> LinkFit:
    """Least squares of relative errors over sizes in bytes, so that small messages count as much as large ones.

    Raises ValueError for fewer than two sizes.
    """
    if len(seconds) < 2:
        raise ValueError("a line needs two points")
    # Minimise sum ((a + b n) / t - 1)^2.
    points = [(1 / t, n / t) for n, t in seconds.items()]
    aa, ab, bb = (sum(x[i] * x[j] for x in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = sum(x for x, _ in points), sum(y for _, y in points)
    determinant = aa * bb - ab * ab
    alpha, beta = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
    if alpha < 0 or beta <= 0:  # noise: nothing but the one of the two that explains more
        alpha, beta = (0.0, b1 / bb) if alpha < 0 else (a1 / aa, 0.0)
    error = max(abs((alpha + beta * n) / t - 1) for n, t in seconds.items())
    return LinkFit(alpha, BUS_FACTORS[operation](ranks) / beta / 1e9 if beta else float("inf"), error)
