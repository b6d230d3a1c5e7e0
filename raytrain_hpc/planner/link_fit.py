"""Link fit: latency and bandwidth of a link from the times of messages of several sizes (alpha-beta model)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Bytes that a rank sends to its neighbor in a ring of p ranks, per byte of the collective.
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
    """Measured collective times among some workers.

    `scope`: "inside a node", "across nodes" (one worker per node), or all workers. `seconds[operation][bytes]`: time of
    the slowest rank, median over rounds.
    """

    scope: str
    ranks: int
    nodes: int
    seconds: Mapping[str, Mapping[int, float]] = field(repr=False)


@dataclass(frozen=True)
class LinkFit:
    """A fit of seconds = alpha + n / beta for n bytes.

    `alpha_s`: latency in seconds. `gbs`: bus bandwidth in GB/s. `error`: largest relative error against the
    measurements.
    """

    alpha_s: float
    gbs: float
    error: float


def fit_operations(timings: CollectiveTimings) -> dict[str, LinkFit]:
    """Return a fit for each operation."""
    return {name: fit_link(name, timings.ranks, seconds) for name, seconds in timings.seconds.items()}


def compute_bus_gbs(operation: str, ranks: int, size: float, seconds: float) -> float:
    """Return the bus bandwidth in GB/s: bytes that cross each rank's link per second (nccl-tests, PERFORMANCE.md)."""
    return BUS_FACTORS[operation](ranks) * size / seconds / 1e9


def fit_link(operation: str, ranks: int, seconds: Mapping[int, float]) -> LinkFit:
    """Fit latency and bandwidth of an operation by least squares of relative errors, so that all sizes count equally.

    `seconds` maps sizes in bytes to times. Raises ValueError for fewer than two sizes.
    """
    if len(seconds) < 2:
        raise ValueError("fitting a link needs timings of at least two sizes")
    # Minimize sum ((a + b n) / t - 1)^2.
    points = [(1 / t, n / t) for n, t in seconds.items()]
    xx, xy, yy = (sum(x[i] * x[j] for x in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    x_sum, y_sum = sum(x for x, _ in points), sum(y for _, y in points)
    determinant = xx * yy - xy * xy
    alpha, beta = (x_sum * yy - y_sum * xy) / determinant, (xx * y_sum - xy * x_sum) / determinant
    if alpha < 0 or beta <= 0:  # noise: keep only the term that explains more
        alpha, beta = (0.0, y_sum / yy) if alpha < 0 else (x_sum / xx, 0.0)
    error = max(abs((alpha + beta * n) / t - 1) for n, t in seconds.items())
    return LinkFit(alpha, BUS_FACTORS[operation](ranks) / beta / 1e9 if beta else float("inf"), error)
