"""`raytrain-hpc doctor`: is this cluster fit to train on, and what to do where it is not."""

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

from raytrain_hpc.cli.options import one_line_errors, split_words
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.link_fit import CollectiveTimings, compute_bus_gbs, fit_link

MESSAGE_SIZES = (1 << 12, 1 << 18, 1 << 23)  # bytes: enough for a line
_MAX_CLOCK_SKEW_S = 1.0  # of clocks, asking included
_MIN_SHARED_MEMORY = 1 << 30  # bytes free on /dev/shm
_MIN_OPEN_FILES = 4096
_MIN_RELATIVE_SPEED = 0.8  # of the median speed

CheckState = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One question, what was found, and what to do about it where that is not well."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class ClusterReport:
    """All checks, and how fast workers reach one another."""

    checks: tuple[Check, ...]
    timings: tuple[CollectiveTimings, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing failed."""
        return all(check.state != "fail" for check in self.checks)

    def format_lines(self) -> Iterator[str]:
        """For a terminal."""
        for check in self.checks:
            yield f"{check.state:<5} {check.name:<12} {check.found}"
            if check.remedy:
                yield f"{'':<18} -> {check.remedy}"
        for reach in self.timings:
            yield ""
            yield f"{reach.scope}: {reach.ranks} workers on {reach.nodes} {_pluralize_nodes(reach.nodes)}"
            yield f"{'operation':<15} {'latency us':>11} {'GB/s':>8} {'at 8 MiB':>9}"
            for name, seconds in reach.seconds.items():
                line, largest = fit_link(name, reach.ranks, seconds), max(seconds)
                bus = compute_bus_gbs(name, reach.ranks, largest, seconds[largest])
                yield f"{name:<15} {1e6 * line.alpha_s:>11.0f} {line.gbs:>8.2f} {bus:>9.2f}"

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        reaches = [
            {**asdict(reach), "seconds": {k: dict(v) for k, v in reach.seconds.items()}} for reach in self.timings
        ]
        return {"fit": self.is_healthy, "checks": [asdict(check) for check in self.checks], "collectives": reaches}


def examine_cluster(config: Config) -> ClusterReport:
    """Start the workers that a run with these settings would have, look around, and end them.

    Raises ClusterError where they do not come up.
    """
    from raytrain_hpc.driver.cluster_probe import open_cluster_probe

    directory = Path(config.run.dir).expanduser().absolute() if config.run.dir else Path.cwd() / "runs"
    with open_cluster_probe(config) as there, _marker_file(directory) as (path, mark):
        before = time.time()
        facts = there.collect_host_info(str(path), mark)
        checks = run_checks(facts, (before, time.time()), str(directory))
        reaches = there.measure_collectives(MESSAGE_SIZES)
    return ClusterReport((_check_cluster(there.cluster, facts), *checks), tuple(reaches))


def run_checks(facts: Sequence[dict[str, Any]], query_interval: tuple[float, float], directory: str) -> list[Check]:
    """What the facts of all workers say. `asked`: this machine's clock before and after they were asked."""
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
    """A file in a directory, and the word in it, which nobody could guess; what was not there is gone afterwards."""
    mark = secrets.token_hex(16)
    path = directory / f".doctor-{mark[:8]}"
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        path.write_text(mark)
        yield path, mark
    finally:
        path.unlink(missing_ok=True)
        for one in made:
            one.rmdir()


def _check_cluster(cluster: Any, facts: Sequence[dict[str, Any]]) -> Check:
    hosts = len({fact["node"] for fact in facts})
    slots = ", ".join(str(node.slots) for node in cluster.nodes)
    racks = sorted({node.rack for node in cluster.nodes} - {""})
    found = f"{len(cluster.nodes)} {_pluralize_nodes(len(cluster.nodes))} with {slots} {cluster.resource} slots"
    found += f", racks {', '.join(racks)}" if racks else ""
    return Check("cluster", "ok", f"{found}; {len(facts)} workers on {hosts}, device {facts[0]['device']}")


def _check_versions(facts: Sequence[dict[str, Any]]) -> Check:
    packages = ["python", *facts[0]["versions"]]
    seen = {name: sorted({fact["versions"].get(name, fact["python"]) for fact in facts}) for name in packages}
    said = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in seen.items())
    if any(len(versions) > 1 for versions in seen.values()):
        return Check("versions", "fail", said, "install the same on every node, or train from one container image")
    return Check("versions", "ok", said)


def _check_clocks(facts: Sequence[dict[str, Any]], query_interval: tuple[float, float]) -> Check:
    before, after = query_interval
    off = max(max(before - fact["time"], fact["time"] - after, 0.0) for fact in facts)
    found = f"at most {off:.2f} s apart"
    if off > _MAX_CLOCK_SKEW_S:
        return Check("clocks", "warn", found, "run chrony or ntpd on every node: incidents are timed by their clocks")
    return Check("clocks", "ok", found)


def _check_shared_memory(facts: Sequence[dict[str, Any]]) -> Check:
    least = min(facts, key=lambda fact: float(fact["shared_memory_free"]))
    found = f"{least['shared_memory_free'] / 2**30:.1f} GiB free at least (node {least['host']})"
    if least["shared_memory_free"] < _MIN_SHARED_MEMORY:
        remedy = "give containers more /dev/shm (docker run --shm-size, an emptyDir of medium Memory)"
        return Check("/dev/shm", "warn", found, remedy)
    return Check("/dev/shm", "ok", found)


def _check_open_files(facts: Sequence[dict[str, Any]]) -> Check:
    least = min(int(fact["open_files"]) for fact in facts)
    if least < _MIN_OPEN_FILES:
        return Check("open files", "warn", f"limit {least}", "ulimit -n 65536 before Ray is started on the nodes")
    return Check("open files", "ok", f"limit {least}")


def _check_directory(facts: Sequence[dict[str, Any]], directory: str) -> Check:
    blind = sorted({str(fact["host"]) for fact in facts if not fact["sees_directory"]})
    if blind:
        remedy = "set run.dir to a file system that every node sees, such as run.dir=/shared/runs/NAME"
        return Check("run.dir", "fail", f"{directory} is not the same on {', '.join(blind)}", remedy)
    return Check("run.dir", "ok", f"{directory} is seen by all workers")


def _check_network(facts: Sequence[dict[str, Any]]) -> Check:
    addresses = sorted({str(fact["address"]) for fact in facts})
    if len(addresses) > 1 and any(address.startswith("127.") for address in addresses):
        remedy = "start Ray with --node-ip-address of an interface that other nodes reach; see cluster.interface"
        return Check("network", "fail", f"workers are at {', '.join(addresses)}", remedy)
    return Check("network", "ok", f"workers are at {', '.join(addresses[:8])}{' ...' if len(addresses) > 8 else ''}")


def _check_speed(facts: Sequence[dict[str, Any]], name: str, key: str, unit: str) -> Check:
    """All ranks wait for the slowest one."""
    speeds = sorted(float(fact[key]) for fact in facts)
    usual, slowest = speeds[len(speeds) // 2], min(facts, key=lambda fact: float(fact[key]))
    found = f"{usual:.3g} {unit} a worker, {speeds[0]:.3g} the slowest"
    if speeds[0] < _MIN_RELATIVE_SPEED * usual:
        remedy = f"look at node {slowest['host']} (pid {slowest['pid']}): other work, clocks or cooling; leave it out"
        return Check(name, "warn", found, remedy)
    return Check(name, "ok", found)


def _pluralize_nodes(count: int) -> str:
    return "node" if count == 1 else "nodes"


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@one_line_errors
def doctor(words: tuple[str, ...], as_json: bool) -> None:
    """Examine the cluster: nodes, versions, clocks, directories, devices, and how fast workers reach one another."""
    from raytrain_hpc.config.loader import load_config

    path, overrides = split_words(words)
    report = examine_cluster(load_config(path, overrides))
    for line in [json.dumps(report.to_json(), indent=2)] if as_json else report.format_lines():
        click.echo(line)
    if not report.is_healthy:
        sys.exit(2)
