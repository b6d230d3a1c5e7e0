"""Checks of `doctor`: each turns facts that the workers reported into one finding, with a remedy if it is not ok."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement

from raytrain_hpc.cli.check import Check, Fact
from raytrain_hpc.cli.wiring_checks import check_adapters, check_numa_nodes
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.topology import Topology
from raytrain_hpc.ray_temp_dir import MAX_SOCKET_PATH_BYTES
from raytrain_hpc.storage.location import is_url
from raytrain_hpc.storage.unfinished_uploads import can_abort_uploads

_MAX_CLOCK_SKEW_S = 1.0  # including the time of the query
_MIN_SHARED_MEMORY = 1 << 30  # free bytes of /dev/shm
_MIN_OPEN_FILES = 4096
_SOCKET_PATH_RESERVE = 4  # bytes: process ids have up to 7 digits
_MIN_RELATIVE_SPEED = 0.8  # relative to the median


def run_checks(
    cluster: Topology, facts: Sequence[Fact], query_interval: tuple[float, float], config: Config
) -> list[Check]:
    """Check the facts that the workers reported. `query_interval`: this machine's clock before and after the query."""
    return [
        _check_cluster(cluster, facts),
        _check_versions(facts),
        _check_cpus(facts, config.cluster.cpu_threads),
        _check_gpus(facts, config.cluster.device),
        check_numa_nodes(facts),
        _check_clocks(facts, query_interval),
        _check_shared_memory(facts),
        _check_socket_paths(facts),
        _check_open_files(facts),
        _check_directory(facts, config.run.dir),
        _check_network(facts),
        _check_ports(facts),
        check_adapters(facts),
        _check_speed(facts, "arithmetic", "tflops", "TFLOP/s"),
        _check_speed(facts, "memory", "memory_gbs", "GB/s"),
    ]


def _check_cluster(cluster: Topology, facts: Sequence[Fact]) -> Check:
    hosts = len({fact["node"] for fact in facts})
    slots = ", ".join(str(node.slots) for node in cluster.nodes)
    racks = sorted(({str(fact["rack"]) for fact in facts} | {node.rack for node in cluster.nodes}) - {""})
    finding = f"{len(cluster.nodes)} {pluralize_nodes(len(cluster.nodes))} with {slots} {cluster.ray_resource} slots"
    finding += f", racks {', '.join(racks)}" if racks else ""
    return Check(
        "cluster",
        "ok",
        f"{finding}; {len(facts)} workers on {hosts} {pluralize_nodes(hosts)}, device {facts[0]['device']}",
    )


def _check_versions(facts: Sequence[Fact]) -> Check:
    packages = ["python", *facts[0]["versions"]]
    versions_by_package = {
        name: sorted({fact["versions"].get(name, fact["python"]) for fact in facts}) for name in packages
    }
    finding = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in versions_by_package.items())
    if any(len(versions) > 1 for versions in versions_by_package.values()):
        return Check("versions", "fail", finding, "install the same versions on every node, or use one container image")
    unsupported = [requirement for requirement in _read_requirements() if not _is_met(requirement, facts[0])]
    if unsupported:
        remedy = f"install {' and '.join(map(str, unsupported))}, the versions that this package supports"
        return Check("versions", "warn", finding, remedy)
    return Check("versions", "ok", finding)


def _read_requirements() -> list[Requirement]:
    """Return what this package requires of torch and Ray; nothing if it runs from its source alone."""
    try:
        requirements = [Requirement(text) for text in requires("raytrain-hpc") or ()]
    except PackageNotFoundError:
        return []
    found = [requirement for requirement in requirements if requirement.name in ("torch", "ray")]
    return [Requirement(f"{requirement.name}{requirement.specifier}") for requirement in found]


def _is_met(requirement: Requirement, fact: Fact) -> bool:
    installed = fact["versions"].get(requirement.name, "missing")
    return installed != "missing" and requirement.specifier.contains(installed, prereleases=True)


def _check_cpus(facts: Sequence[Fact], threads: int) -> Check:
    """Warn if the workers of a node have more threads than the node has usable CPUs."""
    workers_by_node = Counter(str(fact["node"]) for fact in facts)
    tightest = min(facts, key=lambda fact: fact["cpus"]["usable"] / workers_by_node[fact["node"]])
    cpus, workers = tightest["cpus"], workers_by_node[tightest["node"]]
    quota = "none" if cpus["quota"] is None else f"{cpus['quota']:g}"
    finding = (
        f"{cpus['usable']} usable for {workers} workers of {threads} threads on node {tightest['node']} "
        f"({cpus['installed']} installed, {cpus['affinity']} in the affinity mask, cgroup quota {quota})"
    )
    if workers * threads > cpus["usable"]:
        remedy = "request more (Slurm --cpus-per-task, PBS ncpus, container limits), or use fewer workers or threads"
        return Check("cpus", "warn", finding, remedy)
    return Check("cpus", "ok", finding)


def _check_gpus(facts: Sequence[Fact], device: str) -> Check:
    """Warn about GPUs of several models, and about GPUs that workers cannot use although the settings allow it."""
    models = Counter(str(fact["device"]) for fact in facts if fact["device"] != "cpu")
    if models:
        memory = min(float(fact["memory_gib"]) for fact in facts if fact["memory_gib"] is not None)
        finding = f"{', '.join(f'{count} x {model}' for model, count in models.items())}, {memory:.0f} GiB at least"
        if len(models) > 1:
            return Check("gpus", "warn", finding, "use nodes with one model of GPU: all ranks wait for the slowest one")
        return Check("gpus", "ok", finding)
    fullest = max(facts, key=lambda fact: int(fact["installed_gpus"]))
    unused, host = fullest["installed_gpus"], fullest["node"]
    if device == "cpu" or not unused:
        return Check("gpus", "ok", "none in use; workers train on CPUs")
    if not fullest["accelerator_build"]:
        finding = f"node {host} has {unused}, but torch {fullest['versions'].get('torch')} is built for CPUs only"
        return Check("gpus", "warn", finding, "install torch's build for these GPUs, or set cluster.device=cpu")
    remedy = f"start Ray with --num-gpus={unused} and request GPUs for the job, or set cluster.device=cpu"
    return Check("gpus", "warn", f"node {host} has {unused}, but Ray offers none", remedy)


def _check_clocks(facts: Sequence[Fact], query_interval: tuple[float, float]) -> Check:
    before, after = query_interval
    skew_s = max(max(before - fact["time"], fact["time"] - after, 0.0) for fact in facts)
    finding = f"at most {skew_s:.2f} s apart"
    if skew_s > _MAX_CLOCK_SKEW_S:
        return Check("clocks", "warn", finding, "run chrony or ntpd on every node: incident times use these clocks")
    return Check("clocks", "ok", finding)


def _check_shared_memory(facts: Sequence[Fact]) -> Check:
    lowest = min(facts, key=lambda fact: float(fact["shared_memory_free"]))
    free_gib, total_gib = (lowest[f"shared_memory_{name}"] / 2**30 for name in ("free", "total"))
    finding = f"{free_gib:.1f} of {total_gib:.1f} GiB free at the minimum (node {lowest['node']})"
    if lowest["shared_memory_free"] < _MIN_SHARED_MEMORY:
        remedy = "give containers more /dev/shm (docker run --shm-size, or an emptyDir of medium Memory)"
        return Check("/dev/shm", "warn", finding, remedy)
    return Check("/dev/shm", "ok", finding)


def _check_socket_paths(facts: Sequence[Fact]) -> Check:
    """Warn if a Ray that is started with a longer process id, or as a second one of a session, might fail."""
    longest = max((str(fact["socket_path"]) for fact in facts), key=len)
    length, directory = len(os.fsencode(longest)), Path(longest).parents[3]
    finding = f"paths of {length} bytes, at most {MAX_SOCKET_PATH_BYTES} are possible (RAY_TMPDIR={directory})"
    if length > MAX_SOCKET_PATH_BYTES - _SOCKET_PATH_RESERVE:
        return Check(
            "sockets", "warn", finding, "set RAY_TMPDIR to a local directory with a shorter path, such as /tmp"
        )
    return Check("sockets", "ok", finding)


def _check_open_files(facts: Sequence[Fact]) -> Check:
    limit = min(int(fact["open_files"]) for fact in facts)
    if limit < _MIN_OPEN_FILES:
        return Check("open files", "warn", f"limit {limit}", "run ulimit -n 65536 before starting Ray on the nodes")
    return Check("open files", "ok", f"limit {limit}")


def _check_directory(facts: Sequence[Fact], directory: str) -> Check:
    problems = {str(fact["node"]): str(fact["directory"]["problem"]) for fact in facts if fact["directory"]["problem"]}
    hosts = sorted(problems)
    if is_url(directory):
        return _check_bucket(facts, directory, problems)
    if hosts:
        remedy = "set run.dir to a file system that every node mounts, such as run.dir=/shared/runs/NAME"
        return Check("run.dir", "fail", f"{directory} is not the same directory on {', '.join(hosts)}", remedy)
    return Check("run.dir", "ok", f"{directory} is visible to all workers")


def _check_bucket(facts: Sequence[Fact], url: str, problems: Mapping[str, str]) -> Check:
    """Check access to an object store; the driver has verified conditional writes before."""
    if problems:
        node, problem = min(problems.items())
        remedy = "set the credentials and the endpoint (AWS_*, GOOGLE_*, AZURE_*) in the environment of every node"
        return Check("run.dir", "fail", f"{url} cannot be used from {', '.join(sorted(problems))} ({problem})", remedy)
    upload, download = (
        min(float(fact["directory"][f"{kind}_mbs"]) for fact in facts) for kind in ("upload", "download")
    )
    finding = f"{url} honours conditional writes; per worker at least {upload:.0f} MB/s up, {download:.0f} MB/s down"
    if not can_abort_uploads(url.partition(":")[0]):
        remedy = "install boto3 where the driver runs, or give the bucket a rule AbortIncompleteMultipartUpload"
        return Check(
            "run.dir", "warn", f"{finding}; parts of uploads that a killed process left are not removed", remedy
        )
    return Check("run.dir", "ok", finding)


def _check_network(facts: Sequence[Fact]) -> Check:
    addresses = sorted({str(fact["address"]) for fact in facts})
    if len(addresses) > 1 and any(address.startswith("127.") for address in addresses):
        remedy = (
            "start Ray with the --node-ip-address of an interface that other nodes reach; see cluster.network_interface"
        )
        return Check("network", "fail", f"workers are at {', '.join(addresses)}", remedy)
    return Check("network", "ok", f"workers are at {', '.join(addresses[:8])}{' ...' if len(addresses) > 8 else ''}")


def _check_ports(facts: Sequence[Fact]) -> Check:
    hosts = sorted({str(fact["node"]) for fact in facts if not fact["reaches_driver"]})
    if hosts:
        remedy = (
            "open all TCP ports between the nodes, or start Ray with --node-ip-address on a network that they share"
        )
        return Check("ports", "fail", f"workers on {', '.join(hosts)} cannot connect to the driver", remedy)
    return Check("ports", "ok", "all workers can connect to the driver")


def _check_speed(facts: Sequence[Fact], name: str, key: str, unit: str) -> Check:
    """Warn if a worker is much slower than the median: all ranks wait for the slowest one."""
    speeds = sorted(float(fact[key]) for fact in facts)
    median_speed, slowest = speeds[len(speeds) // 2], min(facts, key=lambda fact: float(fact[key]))
    finding = f"{median_speed:.3g} {unit} per worker, slowest {speeds[0]:.3g}"
    if speeds[0] < _MIN_RELATIVE_SPEED * median_speed:
        remedy = f"check node {slowest['node']} (pid {slowest['pid']}) for other load, clocks or cooling; or exclude it"
        return Check(name, "warn", finding, remedy)
    return Check(name, "ok", finding)


def pluralize_nodes(count: int) -> str:
    """Return "node" or "nodes"."""
    return "node" if count == 1 else "nodes"
