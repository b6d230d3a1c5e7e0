"""bench comm: collectives between the workers that a run would have, and the links that plans are made with."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median

from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.cluster_probe import probes
from raytrain_hpc.planner.link_fit import Reach, bus_gbs, fit
from raytrain_hpc.planner.measured_links import links, remember

SIZES = tuple(1 << power for power in (10, 13, 16, 19, 22, 24))  # bytes


def run(rounds: int) -> Table:
    """Every operation at every size, `rounds` times around; what is fitted is kept for plans."""
    with probes(load_config(None, [])) as there:
        turns = [there.reach(SIZES) for _ in range(rounds)]
        device = there.cluster.device_name
    reaches = [_together([turn[place] for turn in turns]) for place in range(len(turns[0]))]
    table = comm_table(reaches)
    if not device:
        table.notes.append("not kept: plan knows no device of this name (raytrain_hpc/planner/hardware.py)")
    else:
        kept = remember(device, links(reaches, f"{datetime.now(UTC):%Y-%m-%d}"))
        table.notes.append(
            f"kept in {kept}: plans for {device} take these links, unless --inside and --across say others"
        )
    return table


def comm_table(reaches: list[Reach]) -> Table:
    """A row for every operation among every set of workers."""
    columns = ("among", "workers", "nodes", "operation", "latency us", "GB/s", "fit off by %", "bus GB/s by size")
    table = Table("bench comm: seconds of a collective as latency + bytes / bandwidth", columns)
    for reach in reaches:
        for name, seconds in reach.seconds.items():
            line = fit(name, reach.ranks, seconds)
            bus = [bus_gbs(name, reach.ranks, size, took) for size, took in seconds.items()]
            scope = (reach.scope, reach.ranks, reach.nodes, name)
            table.add(*scope, 1e6 * line.alpha_s, line.gbs, 100 * line.error, bus)
    table.notes += [
        f"sizes {', '.join(_size(size) for size in SIZES)}; the slowest rank counts, medians; GB/s are bus bandwidth",
        "send: from the first of them to the last; fits weigh relative errors, and are of all sizes at once",
    ]
    return table


def _together(turns: list[Reach]) -> Reach:
    """The median over turns."""
    first = turns[0]
    seconds = {
        name: {size: median(turn.seconds[name][size] for turn in turns) for size in sizes}
        for name, sizes in first.seconds.items()
    }
    return Reach(first.scope, first.ranks, first.nodes, seconds)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
