"""Watchdog: decide from heartbeats which workers and nodes have failed, and which ranks are slow. Pure functions.

The node agents read the heartbeats (runtime/heartbeat.py) and call `find_suspects`; the driver calls the rest. All
timeouts for workers derive from one setting, `fault.stall_timeout`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from raytrain_hpc.config.schema import AUTO, Config

Phase = Literal["idle", "building", "loading", "training", "evaluating", "saving", "callback"]
SuspectKind = Literal["frozen", "interpreter held", "stalled"]

_HEARTBEAT_TIMEOUT_S = 0.6  # heartbeats come every 0.05 s
_MIN_STALL_TIMEOUT_S, _STALL_TIMEOUT_STEPS = 0.8, 2.7  # detection within 1 s or 3 steps
_INITIAL_STALL_TIMEOUT_S = 300.0  # until a step time is known
_DEADLOCK_FACTOR = 4.0  # times the timeout of a single suspect
_MIN_SAMPLES, _MIN_SAMPLED_STEPS = 40, 5  # needed to compare the speed of ranks
# Without an answer from a node; the second applies if some of its or other ranks have failed too.
_NODE_TIMEOUT_S, _NODE_TIMEOUT_AFTER_RANK_LOSS_S = 10.0, 0.6
_SLOW_PHASE_TIMEOUT_S = 300.0  # all phases but training may wait for a file system, a compiler or code of the user
_BUSY_PHASES = ("loading", "training", "evaluating", "saving", "callback")  # in which storage and code of the user run
_OWN_PHASES = ("loading", "callback")  # in which a rank can be long before others, which wait for it


@dataclass(frozen=True)
class WorkerHealth:
    """A health sample of one worker, read from its heartbeat.

    Ages are in seconds and exclude time in which the training loop was runnable but had no CPU, so that an overloaded
    machine is not mistaken for a fault. For `heartbeat_age_s` the same holds for every thread of the worker. The
    `num_` fields are counters that never reset.
    """

    rank: int
    is_alive: bool
    is_frozen: bool  # stopped by a signal
    heartbeat_age_s: float  # since the heartbeat thread last ran
    progress_age_s: float  # since the training loop last reported progress
    phase: Phase
    step: int
    step_s: float | None  # duration of the last step, None if unknown
    num_samples: int = 0  # stack samples of the training loop, taken in phase "training"
    num_waiting_samples: int = 0  # samples in which the loop was waiting for other ranks
    num_urgent_records: int = 0  # records that the driver should fetch immediately
    last_beat_unix: float = 0.0  # Unix time at which the heartbeat thread last ran, by the clock of its node


@dataclass(frozen=True)
class Timeouts:
    """Ages in seconds beyond which a worker is a suspect."""

    heartbeat_s: float  # of the heartbeat of a frozen worker
    stall_s: float  # of heartbeat or progress in phase "training"
    slow_phase_s: float  # of heartbeat or progress in any other phase


@dataclass(frozen=True)
class Suspect:
    """A worker that exceeded a timeout.

    `kind`: "frozen", the process is stopped by a signal; "interpreter held", its heartbeat thread cannot get the GIL;
    "stalled", the training loop makes no progress, possibly because it waits for another rank.
    """

    rank: int
    kind: SuspectKind
    silent_s: float  # age of its heartbeat or of its last progress, by `kind`
    timeout_s: float


def is_deadlocked(suspects: Sequence[Suspect], world_size: int) -> bool:
    """Return whether all ranks are suspects and each has exceeded its timeout by a factor of four.

    Call when `attribute_fault` names no rank: the ranks then wait for each other and none will continue.
    """
    return len(suspects) == world_size and all(
        suspect.silent_s > _DEADLOCK_FACTOR * suspect.timeout_s for suspect in suspects
    )


def compute_timeouts(config: Config, recent_step_s: Sequence[float]) -> Timeouts:
    """Return the timeouts set by `fault.stall_timeout`, or derived from the durations of recent steps if it is auto.

    Call before each `find_suspects`. `recent_step_s` is empty until the first step has finished.
    """
    stall_timeout = config.fault.stall_timeout
    if stall_timeout != AUTO:
        return Timeouts(float(stall_timeout), float(stall_timeout), max(float(stall_timeout), _SLOW_PHASE_TIMEOUT_S))
    stall_s = (
        max(_MIN_STALL_TIMEOUT_S, _STALL_TIMEOUT_STEPS * median(recent_step_s))
        if recent_step_s
        else _INITIAL_STALL_TIMEOUT_S
    )
    return Timeouts(_HEARTBEAT_TIMEOUT_S, stall_s, max(stall_s, _SLOW_PHASE_TIMEOUT_S))


def find_lost_nodes(
    silent_s: Mapping[str, float], *, has_lost_ranks: bool, dead_nodes: Collection[str] = ()
) -> list[str]:
    """Return the nodes that have not answered in time, and those in `dead_nodes`.

    Call whenever the driver polls its node agents. `silent_s`: seconds for which each node has owed an answer.
    `has_lost_ranks`: whether ranks have failed, which shortens the timeout from 10 s to 0.6 s. `dead_nodes`: nodes
    known to be down, because they refuse connections to Ray's process.
    """
    timeout_s = _NODE_TIMEOUT_AFTER_RANK_LOSS_S if has_lost_ranks else _NODE_TIMEOUT_S
    return [node for node, seconds in silent_s.items() if seconds > timeout_s or node in dead_nodes]


def find_suspects(workers: Sequence[WorkerHealth], timeouts: Timeouts) -> list[Suspect]:
    """Return the workers that look unhealthy. Exited workers are excluded; Ray reports those.

    Call with a fresh health sample of each worker of a node. Idle workers are never suspects. If any worker is frozen
    or has its interpreter held, only such workers are returned: stalled workers are then waiting for them.
    """
    suspects = []
    for worker in workers:
        if not worker.is_alive or worker.phase == "idle":
            continue
        timeout_s = timeouts.stall_s if worker.phase == "training" else timeouts.slow_phase_s
        if worker.is_frozen and worker.heartbeat_age_s > timeouts.heartbeat_s:
            suspects.append(Suspect(worker.rank, "frozen", worker.heartbeat_age_s, timeouts.heartbeat_s))
        elif worker.heartbeat_age_s > timeout_s:
            suspects.append(Suspect(worker.rank, "interpreter held", worker.heartbeat_age_s, timeout_s))
        elif worker.progress_age_s > timeout_s:
            suspects.append(Suspect(worker.rank, "stalled", worker.progress_age_s, timeout_s))
    certain = [suspect for suspect in suspects if suspect.kind != "stalled"]
    return certain or suspects


def is_busy(worker: WorkerHealth, timeouts: Timeouts) -> bool:
    """Return whether a worker may be in a callback, or wait for storage, which an abort does not interrupt.

    Call for workers that have not ended an aborted generation in time. Each phase has its usual timeout.
    """
    timeout_s = timeouts.stall_s if worker.phase == "training" else timeouts.slow_phase_s
    is_due = worker.phase in _BUSY_PHASES and worker.progress_age_s <= timeout_s
    return worker.is_alive and not worker.is_frozen and is_due


def is_waiting_for_busy_rank(suspects: Sequence[Suspect], workers: Collection[WorkerHealth]) -> bool:
    """Return whether stalled suspects may be waiting for a rank that is no suspect: it loads data or runs a callback.

    Call with the suspects and the health samples of all nodes.
    """
    ranks = {suspect.rank for suspect in suspects}
    is_busy = any(worker.phase in _OWN_PHASES and worker.rank not in ranks for worker in workers)
    return is_busy and any(suspect.kind == "stalled" for suspect in suspects)


def exclude_waiting(suspects: Sequence[Suspect], since_busy_s: float) -> list[Suspect]:
    """Return the suspects without stalled ones for which the others have had no time to catch up.

    `since_busy_s`: seconds since `is_waiting_for_busy_rank` was last true; the timeout counts from then.
    """
    return [suspect for suspect in suspects if suspect.kind != "stalled" or since_busy_s > suspect.timeout_s]


def find_stragglers(
    previous: Mapping[int, WorkerHealth],
    current: Mapping[int, WorkerHealth],
    factor: float,
    num_microbatches_by_rank: Sequence[int],
) -> dict[int, float] | None:
    """Return the ranks that are at least `factor` times slower than the median of the other ranks, and how much slower.

    Call periodically with two health samples of all ranks. Returns None if they are less than 40 stack samples or
    5 steps apart on any rank: keep `previous` and call again later.

    All ranks take equally long per step because they wait for the slowest. The time that a rank takes per microbatch
    is therefore measured as the share of stack samples in which it does not wait for other ranks, divided by
    `num_microbatches_by_rank[rank]`.
    """
    work_shares: dict[int, float] = {}
    for rank, health in current.items():
        earlier = previous.get(rank)
        if (
            earlier is None
            or health.num_samples - earlier.num_samples < _MIN_SAMPLES
            or health.step - earlier.step < _MIN_SAMPLED_STEPS
        ):
            return None
        samples = health.num_samples - earlier.num_samples
        work_shares[rank] = (
            1.0 - (health.num_waiting_samples - earlier.num_waiting_samples) / samples
        ) / num_microbatches_by_rank[rank]
    slowdowns = {}
    for rank, share in work_shares.items():
        peer_shares = [peer_share for peer_rank, peer_share in work_shares.items() if peer_rank != rank]
        # The lower bound keeps the quotient finite if the other ranks only wait.
        typical = max(median(peer_shares), 1.0 / _MIN_SAMPLES / max(num_microbatches_by_rank)) if peer_shares else share
        if share >= factor * typical:
            slowdowns[rank] = share / typical
    return slowdowns
