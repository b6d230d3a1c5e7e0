"""Stall attribution: ask the ranks of a run without progress what they wait for, and name those that hold it up."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.root_cause import LINK_DOWN
from raytrain_hpc.driver.worker_group import Worker
from raytrain_hpc.elastic.fault_attribution import CollectiveCall, attribute_fault, describe_pending_call
from raytrain_hpc.elastic.link_attribution import LinkFault, attribute_links
from raytrain_hpc.elastic.watchdog import Suspect, is_deadlocked

_REPLY_TIMEOUT_S = 0.3


@dataclass(frozen=True)
class StallAttribution:
    """The ranks that hold a run up. `kinds`: of their failures, by rank. `operation`: what the others wait in.

    `reason`: what was observed, "" for the silence of the ranks alone.
    """

    kinds: Mapping[int, str]
    operation: str
    reason: str = ""


def attribute_stall(
    suspects: Sequence[Suspect], workers: Sequence[Worker], driver_node: str
) -> StallAttribution | None:
    """Return which ranks hold up the others, None if that cannot be decided yet. Asks the ranks that can reply."""
    by_rank = {suspect.rank: suspect for suspect in suspects}
    kinds: dict[int, str] = {suspect.rank: suspect.kind for suspect in suspects if suspect.kind != "stalled"}
    responsive = {rank: worker for rank, worker in enumerate(workers) if rank not in kinds}
    calls: dict[int, Sequence[CollectiveCall]] = _ask(responsive, "recent_calls")
    if not kinds and (
        links := attribute_links(_ask(responsive, "count_link_timeouts"), _list_nodes(workers), driver_node)
    ):
        return StallAttribution(
            dict.fromkeys(links.ranks, LINK_DOWN), describe_pending_call(calls), _describe_links(links)
        )
    fault = attribute_fault(calls)
    if not kinds and fault:
        kinds = {rank: fault.kind for rank in fault.ranks if rank in by_rank}
    if not kinds and not fault:  # no rank differs from the rest: suspects that wait in no collective have stalled
        kinds = {rank: "stalled" for rank in by_rank if not any(call.is_pending for call in calls.get(rank, ()))}
        kinds = {} if len(kinds) == len(workers) or kinds.keys() - calls.keys() else kinds
    if not kinds and is_deadlocked(suspects, len(workers)):
        kinds = {min(by_rank): "deadlocked"}
    return StallAttribution(kinds, fault.operation if fault else describe_pending_call(calls)) if kinds else None


def _list_nodes(workers: Sequence[Worker]) -> list[str]:
    return [str(worker.info["node_id"]) for worker in workers]


def _describe_links(fault: LinkFault) -> str:
    links = ", ".join(f"{rank} to {peer}" for rank, peer in fault.links[:4]) + (", ..." if len(fault.links) > 4 else "")
    doubt = "" if fault.is_certain else "; the other end could be at fault as well"
    return f"nothing is acknowledged from rank {links}{doubt}"


def _ask(workers: Mapping[int, Worker], method: str) -> dict[int, Any]:
    """Call a method of these ranks; return the replies by rank, without those that take longer than 0.3 s."""
    refs = {rank: getattr(worker.actor, method).remote() for rank, worker in workers.items()}
    ready = ray.wait(list(refs.values()), num_returns=len(refs), timeout=_REPLY_TIMEOUT_S)[0] if refs else []
    replies: dict[int, Any] = {}
    for rank, ref in refs.items():
        with contextlib.suppress(RayError):
            replies |= {rank: ray.get(ref)} if ref in ready else {}
    return replies
