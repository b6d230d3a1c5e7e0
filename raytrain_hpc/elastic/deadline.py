"""Deadline policy: when to stop a run so that its last checkpoint is saved in time. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

_EXIT_S = 15.0  # to notice the deadline, publish the checkpoint, write the result and end the processes
_STEPS = 2  # the one that runs, and the next one if the request comes after the ranks have agreed to continue
_SAVES = 2  # a shared file system can be twice as slow as it was
_ASSUMED_BYTES_PER_S = 50e6  # of a rank to a busy file system, until a checkpoint has been measured
_ASSUMED_SAVE_S = 60.0  # for a state of unknown size


@dataclass(frozen=True)
class Deadline:
    """Unix time before which a run must have ended, and the setting or variable that it comes from."""

    unix: float
    origin: str


@dataclass(frozen=True)
class StopCosts:
    """Seconds of a step, and of a checkpoint from the copy of the state to its publication."""

    step_s: float
    save_s: float

    @property
    def margin_s(self) -> float:
        """Seconds before the deadline at which to stop."""
        return _STEPS * self.step_s + _SAVES * self.save_s + _EXIT_S

    def describe(self) -> str:
        """Return the margin and its parts in words."""
        return (
            f"{self.margin_s:.0f} s = {_STEPS} steps of {self.step_s:.2g} s + {_SAVES} x {self.save_s:.2g} s for a "
            f"checkpoint + {_EXIT_S:.0f} s to exit"
        )


def should_stop(now_unix: float, deadline: Deadline, costs: StopCosts) -> bool:
    """Return whether to request a stop now: later, the checkpoint might not be complete before the deadline."""
    return now_unix + costs.margin_s >= deadline.unix


def assume_save_s(state_bytes_per_rank: int | None) -> float:
    """Return the seconds of a checkpoint to assume before one has been measured. None: a state of unknown size."""
    return _ASSUMED_SAVE_S if state_bytes_per_rank is None else state_bytes_per_rank / _ASSUMED_BYTES_PER_S
