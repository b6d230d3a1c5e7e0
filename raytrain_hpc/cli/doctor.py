"""`raytrain-hpc doctor`: check whether a cluster is ready for training, with a remedy for each problem."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import click

from raytrain_hpc.cli.check import Check
from raytrain_hpc.cli.cluster_checks import pluralize_nodes, run_checks
from raytrain_hpc.cli.options import CONFIG_WORDS, ConfigCommand, print_errors_on_one_line, split_words
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.link_fit import CollectiveTimings, compute_bus_gbs, fit_link
from raytrain_hpc.storage.location import make_absolute, parse_location
from raytrain_hpc.storage.object_path import ObjectPath

MESSAGE_SIZES = (1 << 12, 1 << 18, 1 << 23)  # bytes: enough to fit latency and bandwidth


@dataclass(frozen=True)
class ClusterReport:
    """All checks, and the timings of collectives between the workers."""

    checks: tuple[Check, ...]
    timings: tuple[CollectiveTimings, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.state != "fail" for check in self.checks)

    def format_lines(self) -> Iterator[str]:
        """Yield the lines of a report for the terminal."""
        for check in self.checks:
            yield check.format_line()
        for timings in self.timings:
            yield ""
            yield f"{timings.scope}: {timings.ranks} workers on {timings.nodes} {pluralize_nodes(timings.nodes)}"
            yield f"{'operation':<15} {'latency us':>11} {'GB/s':>8} {'at 8 MiB':>9}"
            for name, seconds in timings.seconds.items():
                fit, largest = fit_link(name, timings.ranks, seconds), max(seconds)
                bus = compute_bus_gbs(name, timings.ranks, largest, seconds[largest])
                yield f"{name:<15} {1e6 * fit.alpha_s:>11.0f} {fit.gbs:>8.2f} {bus:>9.2f}"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        collectives = [
            {**asdict(timings), "seconds": {k: dict(v) for k, v in timings.seconds.items()}} for timings in self.timings
        ]
        return {"fit": self.is_healthy, "checks": [asdict(check) for check in self.checks], "collectives": collectives}


def examine_cluster(config: Config) -> ClusterReport:
    """Start the workers of a run with this config, check them, time collectives between them, and stop them.

    Collectives are not timed if workers cannot connect. Raises ClusterError if the workers cannot be started.
    """
    from raytrain_hpc.driver.cluster_probe import open_cluster_probe

    with open_cluster_probe(config) as probe, _marker_file(make_absolute(config.run.dir)) as (path, token):
        before = time.time()
        facts = probe.collect_host_info(path, token)
        checks = run_checks(probe.cluster, facts, (before, time.time()), config)
        can_connect = all(fact["reaches_driver"] for fact in facts)
        timings = probe.measure_collectives(MESSAGE_SIZES) if can_connect else []
    return ClusterReport(tuple(checks), tuple(timings))


@contextmanager
def _marker_file(run_dir: str) -> Iterator[tuple[str, str]]:
    """Create a file with a random token in the run directory; yield its path and the token.

    Removes the file afterwards, and the directories that it had to create. Raises RunDirectoryError if it cannot be
    written, or if an object store ignores conditional writes.
    """
    from raytrain_hpc.checkpoint.lease import check_writable

    directory, token = parse_location(run_dir), secrets.token_hex(16)
    check_writable(directory)
    path = directory / f".doctor-{token[:8]}"
    if isinstance(path, ObjectPath):
        path.write_bytes(token.encode())
        try:
            yield str(path), token
        finally:
            path.delete()
        return
    created = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(token)
        yield str(path), token
    finally:
        path.unlink(missing_ok=True)
        for parent in created:
            parent.rmdir()


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@print_errors_on_one_line
def doctor(words: tuple[str, ...], as_json: bool) -> None:
    """Check the cluster: nodes, versions, CPUs, GPUs, clocks, memory, directories, ports, and collectives.

    One line per check, with the remedy if it is not ok; exit code 2 if one fails.
    """
    from raytrain_hpc.config.loader import load_command_line

    path, overrides = split_words(words)
    report = examine_cluster(load_command_line(path, overrides))
    for line in [json.dumps(report.to_json(), indent=2)] if as_json else report.format_lines():
        click.echo(line)
    if not report.is_healthy:
        sys.exit(2)
