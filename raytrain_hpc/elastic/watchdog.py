"""When is a worker given up on? Signs of life -> suspects, and every limit of time from one number. Pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from raytrain_hpc.config.schema import AUTO, Config

Phase = Literal["idle", "building", "loading", "training", "evaluating", "saving"]
Kind = Literal["frozen", "interpreter held", "stalled"]

_BEAT_S = 0.6  # without a beat, which comes every 0.05 s
_STALL_S, _STALL_STEPS = 0.8, 2.7  # so that it is found out within 1 s, or 3 steps
_UNKNOWN_STALL_S = 300.0  # until a step has shown how long one takes
_DEADLOCK = 4.0  # times the patience with one rank
_LOOKS, _LOOK_STEPS = 40, 5  # until it is known who waits for whom
_NODE_S, _NODE_BROKEN_S = 10.0, 0.6  # without an answer from a node; the second where ranks have gone, too
_SLOW_S = 300.0  # who builds, loads or saves may wait for a file system, or for a compiler


@dataclass(frozen=True)
class Signs:
    """What can be seen of a worker at a moment.

    Ages are in seconds, less the time in which its loop was ready to run and had no CPU (of beats, any of its threads):
    a machine with too much to do is no fault. `step_s`: how long its last step took, None where unknown. `looks`,
    `waiting` and `urgent` count up for ever.
    """

    rank: int
    alive: bool
    frozen: bool  # stopped by a signal
    beat_age_s: float
    mark_age_s: float
    phase: Phase
    step: int
    step_s: float | None
    looks: int = 0  # at what the loop was at, while training
    waiting: int = 0  # of those, how often it waited for other ranks
    urgent: int = 0  # records made that the driver should fetch at once


@dataclass(frozen=True)
class Limits:
    """Seconds after which a silence counts, in the order in which they are checked."""

    beat_s: float
    stall_s: float
    slow_s: float


@dataclass(frozen=True)
class Suspect:
    """A worker that shows no life. stalled: its loop does not go on, perhaps because it waits for another one."""

    rank: int
    kind: Kind
    silent_s: float
    patience_s: float


def deadlocked(found: Sequence[Suspect], world: int) -> bool:
    """Whether all ranks have stood still for so long that none of them will go on, whoever is to blame for it."""
    return len(found) == world and all(one.silent_s > _DEADLOCK * one.patience_s for one in found)


def limits(config: Config, step_s: Sequence[float]) -> Limits:
    """Limits from `fault.stall_timeout`, or from how long the last steps took."""
    chosen = config.fault.stall_timeout
    if chosen != AUTO:
        return Limits(float(chosen), float(chosen), max(float(chosen), _SLOW_S))
    stall = max(_STALL_S, _STALL_STEPS * median(step_s)) if step_s else _UNKNOWN_STALL_S
    return Limits(_BEAT_S, stall, max(stall, _SLOW_S))


def lost_nodes(silent_s: Mapping[str, float], *, broken: bool, refusing: Collection[str] = ()) -> list[str]:
    """Nodes that are given up on. `silent_s`: since when each has owed an answer; `broken`: whether ranks are gone.

    `refusing`: those that answer for themselves that what ran there does not any more.
    """
    patience = _NODE_BROKEN_S if broken else _NODE_S
    return [node for node, seconds in silent_s.items() if seconds > patience or node in refusing]


def suspects(signs: Sequence[Signs], bounds: Limits) -> list[Suspect]:
    """Who is not as a worker should be. One that ended is none: that is heard otherwise.

    Frozen workers and those whose interpreter is held are to blame for the others, who wait for them: these are not
    named beside them.
    """
    found = []
    for one in signs:
        if not one.alive or one.phase == "idle":
            continue
        patience = bounds.stall_s if one.phase == "training" else bounds.slow_s
        if one.frozen and one.beat_age_s > bounds.beat_s:
            found.append(Suspect(one.rank, "frozen", one.beat_age_s, bounds.beat_s))
        elif one.beat_age_s > patience:
            found.append(Suspect(one.rank, "interpreter held", one.beat_age_s, patience))
        elif one.mark_age_s > patience:
            found.append(Suspect(one.rank, "stalled", one.mark_age_s, patience))
    certain = [one for one in found if one.kind != "stalled"]
    return certain or found


def stragglers(
    before: Mapping[int, Signs], now: Mapping[int, Signs], factor: float, load: Sequence[int]
) -> dict[int, float] | None:
    """Ranks that keep the others waiting, and how many times as long as the others' median they take for as much.

    All ranks take as long for a step, whoever it is that holds it up: what tells them apart is for how much of it they
    do not wait, by `load[r]`, what rank r has to do in a step. `before` and `now` are two looks at all ranks; None
    where they are not far enough apart for that share to be known, which takes 40 looks and 5 steps.
    """
    working: dict[int, float] = {}
    for rank, sign in now.items():
        earlier = before.get(rank)
        if earlier is None or sign.looks - earlier.looks < _LOOKS or sign.step - earlier.step < _LOOK_STEPS:
            return None
        looks = sign.looks - earlier.looks
        working[rank] = (1.0 - (sign.waiting - earlier.waiting) / looks) / load[rank]
    found = {}
    for rank, share in working.items():
        others = [other for one, other in working.items() if one != rank]
        usual = max(median(others), 1.0 / _LOOKS / max(load)) if others else share
        if share >= factor * usual:
            found[rank] = share / usual
    return found
