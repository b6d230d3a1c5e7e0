"""Policy of runs that share a cluster: how many of its devices each may hold, by priority. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf


@dataclass(frozen=True)
class DeviceClaim:
    """What a run reports about itself. Numbers of workers include spares; each takes one device.

    `since`: unix time of its first claim. `minimum`: fewest workers on which it trains, or starts. `maximum`: most that
    it can use; None: any number. `held`: devices that it has reserved. `is_started`: it has reserved its first ones.
    Sizes that it can use are its minimum, and `spares` and a multiple of `group_size` together. `requested`: workers
    for which it wants nodes of the autoscaler, in bundles of `group_size_per_node` times `unit`. `resource`: "GPU" or
    "CPU", as for `total` and `free`, the devices of all live nodes, and those of them that Ray reports as free.
    """

    run_id: str
    name: str
    priority: int
    since: float
    minimum: int
    maximum: int | None = None
    held: int = 0
    is_started: bool = False
    group_size: int = 1
    spares: int = 0
    requested: int = 0
    group_size_per_node: int = 1
    unit: int = 1
    resource: str = "CPU"
    total: int = 0
    free: int = 0

    def round_down(self, devices: float) -> int:
        """Return the largest number up to `devices` that the run can use; 0 below its minimum."""
        if devices < self.minimum:
            return 0
        if self.maximum is not None:
            devices = min(devices, self.maximum)
        return max(self.minimum, int(devices - self.spares) // self.group_size * self.group_size + self.spares)


@dataclass(frozen=True)
class Allowance:
    """Devices that a run may hold; None: as many as it likes. `holder`: the run that has the others, for messages."""

    devices: int | None = None
    holder: str = ""

    def limit(self, devices: int) -> int:
        """Return the number of devices, at most those that the run may hold."""
        return devices if self.devices is None else min(devices, self.devices)


UNLIMITED = Allowance()


def sort_claims(claims: Collection[DeviceClaim]) -> list[DeviceClaim]:
    """Return the claims by priority, highest first; those of one priority in the order in which they came."""
    return sorted(claims, key=lambda claim: (-claim.priority, claim.since, claim.run_id))


def count_foreign_devices(claims: Collection[DeviceClaim]) -> int:
    """Return the devices of one resource that are neither free nor held by a run: other jobs have them."""
    if not claims:
        return 0
    total, free = max(claim.total for claim in claims), max(claim.free for claim in claims)
    return max(0, total - free - sum(claim.held for claim in claims))


def allocate_devices(devices: int, claims: Collection[DeviceClaim]) -> dict[str, int]:
    """Return how many of `devices` each run may hold, by run id.

    A run that has started keeps its minimum, even if `devices` are fewer. Beyond that, the highest priority gets what
    it can use, and each lower one of what is left. Of one priority, those that have started keep what they hold, then
    those that have not get their minimum, then each gets what it can use, in the order in which they came. A run that
    has not started gets its minimum at least, or nothing. Devices that no run can use stay with those that hold them.
    """
    order = sort_claims(claims)
    shares = {claim.run_id: claim.minimum if claim.is_started else 0 for claim in order}

    def raise_share(claim: DeviceClaim, wanted: float) -> None:
        share = shares[claim.run_id]
        available = share + max(0, devices - sum(shares.values()))
        shares[claim.run_id] = max(share, claim.round_down(min(wanted, available)))

    for _, same_priority in groupby(order, key=lambda claim: claim.priority):
        group = list(same_priority)
        for claim in group:
            if claim.is_started:
                raise_share(claim, claim.held)
        for claim in group:
            if not claim.is_started:
                raise_share(claim, claim.minimum)
        for claim in group:
            if shares[claim.run_id]:
                raise_share(claim, inf)
    for claim in order:
        left = max(0, devices - sum(shares.values()))
        shares[claim.run_id] += min(left, max(0, claim.held - shares[claim.run_id]))
    return shares


def find_allowance(devices: int, claims: Collection[DeviceClaim], run_id: str) -> Allowance:
    """Return the allowance of a run among all that claim some of `devices`. A run without others has no limit."""
    order = sort_claims(claims)
    (claim,) = (claim for claim in order if claim.run_id == run_id)
    if len(order) == 1:
        return UNLIMITED
    shares = allocate_devices(devices, order)
    preferred = order[: order.index(claim)]
    is_short = shares[run_id] < claim.round_down(devices)
    holders = [other for other in preferred if shares[other.run_id]] if is_short else []
    return Allowance(shares[run_id], describe_run(max(holders, key=lambda c: shares[c.run_id])) if holders else "")


def describe_run(claim: DeviceClaim) -> str:
    """Return name and priority of a run, for messages."""
    return f"run {claim.name} of priority {claim.priority}"


def count_requested_workers(claim: DeviceClaim, allowance: Allowance) -> int:
    """Return the workers for which nodes are requested on behalf of a run.

    A run that another one has priority over requests no more than it may hold, and its minimum.
    """
    if not allowance.holder or allowance.devices is None:
        return claim.requested
    return min(claim.requested, max(claim.minimum, allowance.devices))


def list_bundles(claim: DeviceClaim, workers: int) -> list[dict[str, float]]:
    """Return the resources of `workers` workers: a bundle per tensor-parallel group, which shares a node."""
    size = claim.group_size_per_node
    return [{claim.resource: float(claim.unit * size)}] * -(-workers // size)


def list_all_bundles(
    claims: Sequence[DeviceClaim], allowance_of_run: Mapping[str, Allowance]
) -> list[dict[str, float]]:
    """Return the resources that all runs together request of the autoscaler. Runs without allowance are not limited."""
    return [
        bundle
        for claim in sort_claims(claims)
        for bundle in list_bundles(claim, count_requested_workers(claim, allowance_of_run.get(claim.run_id, UNLIMITED)))
    ]
