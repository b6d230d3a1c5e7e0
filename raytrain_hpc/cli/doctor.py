"""`raytrain-hpc doctor`: check whether a cluster is ready for training, with a remedy for each problem."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click

from raytrain_hpc.cli.options import CONFIG_WORDS, ConfigCommand, print_errors_on_one_line, split_words
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.link_fit import CollectiveTimings, compute_bus_gbs, fit_link
from raytrain_hpc.planner.topology import Topology

MESSAGE_SIZES = (1 << 12, 1 << 18, 1 << 23)  # bytes: enough to fit latency and bandwidth
_MAX_CLOCK_SKEW_S = 1.0  # including the time of the query
_MIN_SHARED_MEMORY = 1 << 30  # free bytes of /dev/shm
_MIN_OPEN_FILES = 4096
_MIN_RELATIVE_SPEED = 0.8  # relative to the median

CheckState = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """Result of one check: its state, the finding, and a remedy if the state is not ok."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""


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
            yield f"{check.state:<5} {check.name:<12} {check.found}"
            if check.remedy:
                yield f"{'':<18} -> {check.remedy}"
        for timings in self.timings:
            yield ""
            yield f"{timings.scope}: {timings.ranks} workers on {timings.nodes} {_pluralize_nodes(timings.nodes)}"
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

    Raises:
        ClusterError: The workers cannot be started.
    """
    from raytrain_hpc.driver.cluster_probe import open_cluster_probe

    directory = Path(config.run.dir).expanduser().absolute() if config.run.dir else Path.cwd() / "runs"
    with open_cluster_probe(config) as probe, _marker_file(directory) as (path, token):
        before = time.time()
        facts = probe.collect_host_info(str(path), token)
        checks = run_checks(facts, (before, time.time()), str(directory))
        timings = probe.measure_collectives(MESSAGE_SIZES)
    return ClusterReport((_check_cluster(probe.cluster, facts), *checks), tuple(timings))


def run_checks(facts: Sequence[dict[str, Any]], query_interval: tuple[float, float], directory: str) -> list[Check]:
    """Check the facts that the workers reported. `query_interval`: this machine's clock before and after the query."""
    return [
        _check_versions(facts),
        _check_clocks(facts, query_interval),
        _check_shared_memory(facts),
        _check_open_files(facts),
        _check_directory(facts, directory),
        _check_network(facts),
        _check_speed(facts, "arithmetic", "tflops", "TFLOP/s"),
        _check_speed(facts, "memory", "memory_gbs", "GB/s"),
    ]


@contextmanager
def _marker_file(directory: Path) -> Iterator[tuple[Path, str]]:
    """Create a file with a random token in `directory`; yield its path and the token.

    Removes the file afterwards, and the directories that it had to create.
    """
    token = secrets.token_hex(16)
    path = directory / f".doctor-{token[:8]}"
    created = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(token)
        yield path, token
    finally:
        path.unlink(missing_ok=True)
        for parent in created:
            parent.rmdir()


def _check_cluster(cluster: Topology, facts: Sequence[dict[str, Any]]) -> Check:
    hosts = len({fact["node"] for fact in facts})
    slots = ", ".join(str(node.slots) for node in cluster.nodes)
    racks = sorted({node.rack for node in cluster.nodes} - {""})
    finding = f"{len(cluster.nodes)} {_pluralize_nodes(len(cluster.nodes))} with {slots} {cluster.ray_resource} slots"
    finding += f", racks {', '.join(racks)}" if racks else ""
    return Check(
        "cluster",
        "ok",
        f"{finding}; {len(facts)} workers on {hosts} {_pluralize_nodes(hosts)}, device {facts[0]['device']}",
    )


def _check_versions(facts: Sequence[dict[str, Any]]) -> Check:
    packages = ["python", *facts[0]["versions"]]
    versions_by_package = {
        name: sorted({fact["versions"].get(name, fact["python"]) for fact in facts}) for name in packages
    }
    finding = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in versions_by_package.items())
    if any(len(versions) > 1 for versions in versions_by_package.values()):
        return Check("versions", "fail", finding, "install the same versions on every node, or use one container image")
    return Check("versions", "ok", finding)


def _check_clocks(facts: Sequence[dict[str, Any]], query_interval: tuple[float, float]) -> Check:
    before, after = query_interval
    skew_s = max(max(before - fact["time"], fact["time"] - after, 0.0) for fact in facts)
    finding = f"at most {skew_s:.2f} s apart"
    if skew_s > _MAX_CLOCK_SKEW_S:
        return Check("clocks", "warn", finding, "run chrony or ntpd on every node: incident times use these clocks")
    return Check("clocks", "ok", finding)


def _check_shared_memory(facts: Sequence[dict[str, Any]]) -> Check:
    lowest = min(facts, key=lambda fact: float(fact["shared_memory_free"]))
    finding = f"{lowest['shared_memory_free'] / 2**30:.1f} GiB free at the minimum (node {lowest['node']})"
    if lowest["shared_memory_free"] < _MIN_SHARED_MEMORY:
        remedy = "give containers more /dev/shm (docker run --shm-size, or an emptyDir of medium Memory)"
        return Check("/dev/shm", "warn", finding, remedy)
    return Check("/dev/shm", "ok", finding)


def _check_open_files(facts: Sequence[dict[str, Any]]) -> Check:
    limit = min(int(fact["open_files"]) for fact in facts)
    if limit < _MIN_OPEN_FILES:
        return Check("open files", "warn", f"limit {limit}", "run ulimit -n 65536 before starting Ray on the nodes")
    return Check("open files", "ok", f"limit {limit}")


def _check_directory(facts: Sequence[dict[str, Any]], directory: str) -> Check:
    hosts = sorted({str(fact["node"]) for fact in facts if not fact["sees_directory"]})
    if hosts:
        remedy = "set run.dir to a file system that every node mounts, such as run.dir=/shared/runs/NAME"
        return Check("run.dir", "fail", f"{directory} is not the same directory on {', '.join(hosts)}", remedy)
    return Check("run.dir", "ok", f"{directory} is visible to all workers")


def _check_network(facts: Sequence[dict[str, Any]]) -> Check:
    addresses = sorted({str(fact["address"]) for fact in facts})
    if len(addresses) > 1 and any(address.startswith("127.") for address in addresses):
        remedy = (
            "start Ray with the --node-ip-address of an interface that other nodes reach; see cluster.network_interface"
        )
        return Check("network", "fail", f"workers are at {', '.join(addresses)}", remedy)
    return Check("network", "ok", f"workers are at {', '.join(addresses[:8])}{' ...' if len(addresses) > 8 else ''}")


def _check_speed(facts: Sequence[dict[str, Any]], name: str, key: str, unit: str) -> Check:
    """Warn if a worker is much slower than the median: all ranks wait for the slowest one."""
    speeds = sorted(float(fact[key]) for fact in facts)
    median_speed, slowest = speeds[len(speeds) // 2], min(facts, key=lambda fact: float(fact[key]))
    finding = f"{median_speed:.3g} {unit} per worker, slowest {speeds[0]:.3g}"
    if speeds[0] < _MIN_RELATIVE_SPEED * median_speed:
        remedy = f"check node {slowest['node']} (pid {slowest['pid']}) for other load, clocks or cooling; or exclude it"
        return Check(name, "warn", finding, remedy)
    return Check(name, "ok", finding)


def _pluralize_nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


@click.command(cls=ConfigCommand)
@click.argument("words", nargs=-1, metavar="[CONFIG] [key=value ...]", type=CONFIG_WORDS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@print_errors_on_one_line
def doctor(words: tuple[str, ...], as_json: bool) -> None:
    """Check the cluster: nodes, versions, clocks, directories, devices, and collectives between workers."""
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    report = examine_cluster(load_config(path, overrides))
    for line in [json.dumps(report.to_json(), indent=2)] if as_json else report.format_lines():
        click.echo(line)
    if not report.is_healthy:
        sys.exit(2)
