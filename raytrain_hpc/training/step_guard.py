"""What is done about a step whose numbers are still bad when it is computed again."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite
from typing import Literal

from torch import Tensor

from raytrain_hpc.config.schema import FaultConfig
from raytrain_hpc.elastic.loss_spikes import WINDOW, highest_usual
from raytrain_hpc.errors import RunFailed
from raytrain_hpc.runtime.control_channel import Record

Bad = Literal["not finite", "loss spike"]


class BadSteps:
    """Judges the numbers of steps, carries out `fault.on_nan`, and reports. The same on every rank.

    `recent`: the losses of the last steps, [WINDOW], a part of the state: a run that goes on elsewhere judges alike.
    `blamed`: the lowest rank that computes one of these microbatches. `go_back(step)` makes the state that of an
    earlier step, which it returns.
    """

    def __init__(
        self,
        fault: FaultConfig,
        recent: Tensor | None,
        blamed: Callable[[list[int]], int | None],
        go_back: Callable[[int], int],
        emit: Callable[[Record], None],
    ):
        self._fault, self._recent, self._blamed, self._go_back, self._emit = fault, recent, blamed, go_back, emit
        self._in_a_row = 0

    def judge(self, loss: float, norm: float) -> Bad | None:
        """What is bad about these numbers of a step, if anything."""
        if not (isfinite(loss) and isfinite(norm)):
            return "not finite"
        return "loss spike" if loss > self._highest() else None

    def taken(self, step: int, loss: float) -> None:
        """The step after `step` committed ones is taken with this loss."""
        self._in_a_row = 0
        self._remember(step, loss)

    def not_taken(self, step: int, loss: float, norm: float) -> int:
        """It was bad twice: end the run, go on without it, or go back. Returns how many committed steps that undoes.

        Raises RunFailed where the run is to end, or that many steps in a row were bad.
        """
        numbers = f"step {step + 1}: loss {loss} and gradient norm {norm}: {self.judge(loss, norm)}, twice"
        if self._fault.on_nan == "stop":
            raise RunFailed(
                f"{numbers}; lower train.lr, check the data, use train.dtype=fp32, or go on without such steps with "
                "fault.on_nan=skip or rollback. The newest checkpoint is from before this step"
            )
        self._in_a_row += 1
        if self._in_a_row > self._fault.max_failures:
            raise RunFailed(
                f"{numbers}, and so were the {self._in_a_row - 1} before it (fault.max_failures="
                f"{self._fault.max_failures}); lower train.lr, or check the data"
            )
        undone = 0 if self._fault.on_nan == "skip" else step - self._go_back(step)
        self._remember(step, loss)
        return undone

    def incident(self, step: int, bad: tuple[float, float], losses: list[float]) -> Record:
        """What is known of it as soon as it is seen. `bad`: loss and norm; `losses`: of the microbatches."""
        loss, norm = bad
        high = self._highest()
        spoilt = [number for number, one in enumerate(losses) if not isfinite(one) or one > high]
        return {
            "type": "incident",
            "kind": self.judge(loss, norm),
            "rank": self._blamed(spoilt),
            "operation": f"training step {step + 1}",
            "reason": f"loss {loss}, gradient norm {norm}",
            "time": time.time(),
        }

    def report(self, incident: Record, outcome: str, undone: int) -> None:
        """It is over. `undone`: committed steps that this took back."""
        taken_s, reason = time.time() - incident["time"], f"{incident['reason']}; {outcome}"
        self._emit(incident | {"reason": reason, "recovered_s": taken_s, "steps_lost": undone})

    def _highest(self) -> float:
        return highest_usual([] if self._recent is None else self._recent.tolist(), self._fault.spike_deviations)

    def _remember(self, step: int, loss: float) -> None:
        if self._recent is not None:
            self._recent[step % WINDOW] = loss
