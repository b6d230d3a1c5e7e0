"""bench comm: collectives between the workers that a run would have, and the links that plans are made with."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median

from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.cluster_probe import open_cluster_probe
from raytrain_hpc.planner.link_fit import CollectiveTimings, compute_bus_gbs, fit_link
from raytrain_hpc.planner.measured_links import derive_links, save_links

MESSAGE_SIZES = tuple(1 << power for power in (10, 13, 16, 19, 22, 24))  # bytes


def run(rounds: int) -> Table:
    """Every operation at every size, `rounds` times around; what is fitted is kept for plans."""
    with open_cluster_probe(load_config(None, [])) as there:
        turns = [there.measure_collectives(MESSAGE_SIZES) for _ in range(rounds)]
        device = there.cluster.device_name
    reaches = [_median_over_rounds([turn[place] for turn in turns]) for place in range(len(turns[0]))]
    table = build_table(reaches)
    if not device:
        table.notes.append("not kept: plan knows no device of this name (raytrain_hpc/planner/hardware.py)")
    else:
        kept = save_links(device, derive_links(reaches, f"{datetime.now(UTC):%Y-%m-%d}"))
        table.notes.append(
            f"kept in {kept}: plans for {device} take these links, unless --inside and --across say others"
        )
    return table


def build_table(timings: list[CollectiveTimings]) -> Table:
    """A row for every operation among every set of workers."""
    columns = ("among", "workers", "nodes", "operation", "latency us", "GB/s", "fit off by %", "bus GB/s by size")
    table = Table("bench comm: seconds of a collective as latency + bytes / bandwidth", columns)
    for reach in timings:
        for name, seconds in reach.seconds.items():
            line = fit_link(name, reach.ranks, seconds)
            bus = [compute_bus_gbs(name, reach.ranks, size, took) for size, took in seconds.items()]
            scope = (reach.scope, reach.ranks, reach.nodes, name)
            table.add_row(*scope, 1e6 * line.alpha_s, line.gbs, 100 * line.error, bus)
    table.notes += [
        f"sizes {', '.join(_format_size(size) for size in MESSAGE_SIZES)}; the slowest rank counts, medians; GB/s are bus bandwidth",
        "send: from the first of them to the last; fits weigh relative errors, and are of all sizes at once",
    ]
    return table


def _median_over_rounds(rounds: list[CollectiveTimings]) -> CollectiveTimings:
    """The median over turns."""
    first = rounds[0]
    seconds = {
        name: {size: median(turn.seconds[name][size] for turn in rounds) for size in sizes}
        for name, sizes in first.seconds.items()
    }
    return CollectiveTimings(first.scope, first.ranks, first.nodes, seconds)


def _format_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
