"""Checks of `doctor` of how hosts are wired: NUMA nodes of devices, and network adapters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_hpc.cli.check import Check, Fact


def check_numa_nodes(facts: Sequence[Fact]) -> Check:
    """Warn if a worker runs on CPUs of another NUMA node than its device."""
    located = [fact for fact in facts if fact["numa_node"] is not None]
    if not located:
        return Check("numa", "ok", "no device belongs to a NUMA node, so that workers use all CPUs of theirs")
    workers = Counter((str(fact["node"]), int(fact["numa_node"])) for fact in located)
    fullest = max(workers, key=lambda key: workers[key])
    nodes = {numa_node for _, numa_node in workers}
    finding = f"devices of {len(nodes)} NUMA nodes, {workers[fullest]} of node {fullest[1]} on host {fullest[0]}"
    unbound = sorted({str(fact["node"]) for fact in located if not fact["is_bound"]})
    if unbound:
        remedy = "give the job CPUs of every NUMA node (Slurm --cpu-bind=none --exclusive), or set cluster.numa_binding"
        return Check(
            "numa", "warn", f"{finding}; workers on {', '.join(unbound)} are not on the CPUs of theirs", remedy
        )
    return Check("numa", "ok", f"{finding}; each worker is on the CPUs of its device")


def check_adapters(facts: Sequence[Fact]) -> Check:
    """Warn about ports that are down, and about hosts whose adapters differ from those of the others."""
    by_host = {str(fact["node"]): [dict(adapter) for adapter in fact["adapters"]] for fact in facts}
    down = {host: [adapter["name"] for adapter in found if not adapter["is_up"]] for host, found in by_host.items()}
    common = Counter(_summarize(found) for found in by_host.values()).most_common(1)[0][0]
    finding = f"per host: {common}"
    if any(down.values()):
        ports = "; ".join(f"{', '.join(names)} on {host}" for host, names in sorted(down.items()) if names)
        remedy = (
            "check cable and switch port (ibstat, ethtool): collectives use what is up, and the slowest host counts"
        )
        return Check("adapters", "warn", f"{finding}; down: {ports}", remedy)
    others = sorted(host for host, found in by_host.items() if _summarize(found) != common)
    if others:
        differing = f"{others[0]}: {_summarize(by_host[others[0]])}"
        remedy = "use hosts with the same adapters and rates: all ranks wait for the slowest one"
        return Check("adapters", "warn", f"{finding}; other ones on {len(others)} hosts, such as {differing}", remedy)
    return Check("adapters", "ok", finding)


def _summarize(adapters: Sequence[Mapping[str, Any]]) -> str:
    """Return how many adapters a host has by rate: "8 of 400 Gbit/s, 1 of 25 Gbit/s"."""
    rates = Counter(float(adapter["gbits"]) for adapter in adapters if adapter["is_up"])
    named = {rate: f"{rate:g} Gbit/s" if rate else "unknown rate" for rate in rates}
    return ", ".join(f"{rates[rate]} of {named[rate]}" for rate in sorted(rates, reverse=True)) or "none is known"
