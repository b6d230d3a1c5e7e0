"""`bench comm`: time collectives between the workers of a run, and fit the link model that the planner uses."""

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
    """Time every collective at every message size, `rounds` times, and save the fitted links for later plans."""
    with open_cluster_probe(load_config(None, [])) as probe:
        rounds_of_timings = [probe.measure_collectives(MESSAGE_SIZES) for _ in range(rounds)]
        device = probe.cluster.device_name
    timings = [
        _compute_medians([round_timings[group] for round_timings in rounds_of_timings])
        for group in range(len(rounds_of_timings[0]))
    ]
    table = build_table(timings)
    if not device:
        table.notes.append("links not saved: the planner has no device of this name (raytrain_hpc/planner/hardware.py)")
    elif not timings:
        table.notes.append("links not saved: one worker has none; measure with at least two")
    else:
        path = save_links(device, derive_links(timings, f"{datetime.now(UTC):%Y-%m-%d}"))
        table.notes.append(
            f"links saved in {path}: later plans for {device} use them, unless --inside or --across is given"
        )
    return table


def build_table(timings: list[CollectiveTimings]) -> Table:
    """Format the timings, one row per operation and set of workers."""
    columns = ("among", "workers", "nodes", "operation", "latency us", "GB/s", "fit off by %", "bus GB/s by size")
    table = Table("bench comm: seconds of a collective as latency + bytes / bandwidth", columns)
    for group in timings:
        for name, seconds in group.seconds.items():
            line = fit_link(name, group.ranks, seconds)
            bus = [compute_bus_gbs(name, group.ranks, size, elapsed) for size, elapsed in seconds.items()]
            scope = (group.scope, group.ranks, group.nodes, name)
            table.add_row(*scope, 1e6 * line.alpha_s, line.gbs, 100 * line.error, bus)
    table.notes += [
        f"sizes {', '.join(_format_size(size) for size in MESSAGE_SIZES)}; time of the slowest rank, median over "
        "rounds; GB/s: bus bandwidth",
        "send: from the first worker to the last; fits minimize relative errors over all sizes",
    ]
    return table


def _compute_medians(rounds: list[CollectiveTimings]) -> CollectiveTimings:
    """Take the median over rounds for each operation and size."""
    first = rounds[0]
    seconds = {
        name: {size: median(timings.seconds[name][size] for timings in rounds) for size in sizes}
        for name, sizes in first.seconds.items()
    }
    return CollectiveTimings(first.scope, first.ranks, first.nodes, seconds)


def _format_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
