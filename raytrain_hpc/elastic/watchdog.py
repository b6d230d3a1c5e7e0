"""When is a worker given up on? Signs of life -> suspects, and every limit of time from one number. Pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from raytrain_hpc.config.schema import AUTO, Config

Phase = Literal["idle", "building", "loading", "training", "evaluating", "saving"]
SuspectKind = Literal["frozen", "interpreter held", "stalled"]

_HEARTBEAT_TIMEOUT_S = 0.6  # without a beat, which comes every 0.05 s
_MIN_STALL_TIMEOUT_S, _STALL_TIMEOUT_STEPS = 0.8, 2.7  # so that it is found out within 1 s, or 3 steps
_INITIAL_STALL_TIMEOUT_S = 300.0  # until a step has shown how long one takes
_DEADLOCK_FACTOR = 4.0  # times the patience with one rank
_MIN_SAMPLES, _MIN_SAMPLED_STEPS = 40, 5  # until it is known who waits for whom
_NODE_TIMEOUT_S, _NODE_TIMEOUT_AFTER_RANK_LOSS_S = (
    10.0,
    0.6,
)  # without an answer from a node; the second where ranks have gone, too
_SLOW_PHASE_TIMEOUT_S = 300.0  # who builds, loads or saves may wait for a file system, or for a compiler


@dataclass(frozen=True)
class WorkerHealth:
    """What can be seen of a worker at a moment.

    Ages are in seconds, less the time in which its loop was ready to run and had no CPU (of beats, any of its threads):
    a machine with too much to do is no fault. `step_s`: how long its last step took, None where unknown. `looks`,
    `waiting` and `urgent` count up for ever.
    """

    rank: int
    is_alive: bool
    is_frozen: bool  # stopped by a signal
    heartbeat_age_s: float
    progress_age_s: float
    phase: Phase
    step: int
    step_s: float | None
    num_samples: int = 0  # at what the loop was at, while training
    num_waiting_samples: int = 0  # of those, how often it waited for other ranks
    num_urgent_records: int = 0  # records made that the driver should fetch at once


@dataclass(frozen=True)
class Timeouts:
    """Seconds after which a silence counts, in the order in which they are checked."""

    heartbeat_s: float
    stall_s: float
    slow_phase_s: float


@dataclass(frozen=True)
class Suspect:
    """A worker that shows no life. stalled: its loop does not go on, perhaps because it waits for another one."""

    rank: int
    kind: SuspectKind
    silent_s: float
    timeout_s: float


def is_deadlocked(suspects: Sequence[Suspect], world_size: int) -> bool:
    """Whether all ranks have stood still for so long that none of them will go on, whoever is to blame for it."""
    return len(suspects) == world_size and all(one.silent_s > _DEADLOCK_FACTOR * one.timeout_s for one in suspects)


def compute_timeouts(config: Config, recent_step_s: Sequence[float]) -> Timeouts:
    """Limits from `fault.stall_timeout`, or from how long the last steps took."""
    chosen = config.fault.stall_timeout
    if chosen != AUTO:
        return Timeouts(float(chosen), float(chosen), max(float(chosen), _SLOW_PHASE_TIMEOUT_S))
    stall = (
        max(_MIN_STALL_TIMEOUT_S, _STALL_TIMEOUT_STEPS * median(recent_step_s))
        if recent_step_s
        else _INITIAL_STALL_TIMEOUT_S
    )
    return Timeouts(_HEARTBEAT_TIMEOUT_S, stall, max(stall, _SLOW_PHASE_TIMEOUT_S))


def find_lost_nodes(
    silent_s: Mapping[str, float], *, has_lost_ranks: bool, dead_nodes: Collection[str] = ()
) -> list[str]:
    """Nodes that are given up on. `silent_s`: since when each has owed an answer; `broken`: whether ranks are gone.

    `refusing`: those that answer for themselves that what ran there does not any more.
    """
    patience = _NODE_TIMEOUT_AFTER_RANK_LOSS_S if has_lost_ranks else _NODE_TIMEOUT_S
    return [node for node, seconds in silent_s.items() if seconds > patience or node in dead_nodes]


def find_suspects(workers: Sequence[WorkerHealth], timeouts: Timeouts) -> list[Suspect]:
    """Who is not as a worker should be. One that ended is none: that is heard otherwise.

    Frozen workers and those whose interpreter is held are to blame for the others, who wait for them: these are not
    named beside them.
    """
    found = []
    for one in workers:
        if not one.is_alive or one.phase == "idle":
            continue
        patience = timeouts.stall_s if one.phase == "training" else timeouts.slow_phase_s
        if one.is_frozen and one.heartbeat_age_s > timeouts.heartbeat_s:
            found.append(Suspect(one.rank, "frozen", one.heartbeat_age_s, timeouts.heartbeat_s))
        elif one.heartbeat_age_s > patience:
            found.append(Suspect(one.rank, "interpreter held", one.heartbeat_age_s, patience))
        elif one.progress_age_s > patience:
            found.append(Suspect(one.rank, "stalled", one.progress_age_s, patience))
    certain = [one for one in found if one.kind != "stalled"]
    return certain or found


def find_stragglers(
    previous: Mapping[int, WorkerHealth],
    current: Mapping[int, WorkerHealth],
    factor: float,
    microbatches_per_rank: Sequence[int],
) -> dict[int, float] | None:
    """Ranks that keep the others waiting, and how many times as long as the others' median they take for as much.

    All ranks take as long for a step, whoever it is that holds it up: what tells them apart is for how much of it they
    do not wait, by `load[r]`, what rank r has to do in a step. `before` and `now` are two looks at all ranks; None
    where they are not far enough apart for that share to be known, which takes 40 looks and 5 steps.
    """
    working: dict[int, float] = {}
    for rank, sign in current.items():
        earlier = previous.get(rank)
        if (
            earlier is None
            or sign.num_samples - earlier.num_samples < _MIN_SAMPLES
            or sign.step - earlier.step < _MIN_SAMPLED_STEPS
        ):
            return None
        looks = sign.num_samples - earlier.num_samples
        working[rank] = (
            1.0 - (sign.num_waiting_samples - earlier.num_waiting_samples) / looks
        ) / microbatches_per_rank[rank]
    found = {}
    for rank, share in working.items():
        others = [other for one, other in working.items() if one != rank]
        usual = max(median(others), 1.0 / _MIN_SAMPLES / max(microbatches_per_rank)) if others else share
        if share >= factor * usual:
            found[rank] = share / usual
    return found
