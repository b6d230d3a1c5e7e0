"""What is done about a step whose numbers are still bad when it is computed again."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isfinite
from typing import Literal

from torch import Tensor

from raytrain_hpc.config.schema import FaultConfig
from raytrain_hpc.elastic.loss_spikes import WINDOW, compute_spike_threshold
from raytrain_hpc.errors import RunFailedError
from raytrain_hpc.runtime.control_channel import Record

BadStepKind = Literal["not finite", "loss spike"]


class StepGuard:
    """Judges the numbers of steps, carries out `fault.on_nan`, and reports. The same on every rank.

    `recent`: the losses of the last steps, [WINDOW], a part of the state: a run that goes on elsewhere judges alike.
    `blamed`: the lowest rank that computes one of these microbatches. `go_back(step)` makes the state that of an
    earlier step, which it returns.
    """

    def __init__(
        self,
        fault: FaultConfig,
        recent_losses: Tensor | None,
        find_responsible_rank: Callable[[list[int]], int | None],
        rollback: Callable[[int], int],
        emit: Callable[[Record], None],
    ):
        self._fault, self._recent_losses, self._find_responsible_rank, self._rollback, self._emit = (
            fault,
            recent_losses,
            find_responsible_rank,
            rollback,
            emit,
        )
        self._num_consecutive = 0

    def check(self, loss: float, grad_norm: float) -> BadStepKind | None:
        """What is bad about these numbers of a step, if anything."""
        if not (isfinite(loss) and isfinite(grad_norm)):
            return "not finite"
        return "loss spike" if loss > self._compute_loss_limit() else None

    def accept(self, step: int, loss: float) -> None:
        """The step after `step` committed ones is taken with this loss."""
        self._num_consecutive = 0
        self._record_loss(step, loss)

    def reject(self, step: int, loss: float, grad_norm: float) -> int:
        """It was bad twice: end the run, go on without it, or go back. Returns how many committed steps that undoes.

        Raises RunFailed where the run is to end, or that many steps in a row were bad.
        """
        numbers = f"step {step + 1}: loss {loss} and gradient norm {grad_norm}: {self.check(loss, grad_norm)}, twice"
        if self._fault.on_nan == "stop":
            raise RunFailedError(
                f"{numbers}; lower train.lr, check the data, use train.dtype=fp32, or go on without such steps with "
                "fault.on_nan=skip or rollback. The newest checkpoint is from before this step"
            )
        self._num_consecutive += 1
        if self._num_consecutive > self._fault.max_failures:
            raise RunFailedError(
                f"{numbers}, and so were the {self._num_consecutive - 1} before it (fault.max_failures="
                f"{self._fault.max_failures}); lower train.lr, or check the data"
            )
        undone = 0 if self._fault.on_nan == "skip" else step - self._rollback(step)
        self._record_loss(step, loss)
        return undone

    def build_incident(self, step: int, loss_and_norm: tuple[float, float], losses: list[float]) -> Record:
        """What is known of it as soon as it is seen. `bad`: loss and norm; `losses`: of the microbatches."""
        loss, norm = loss_and_norm
        high = self._compute_loss_limit()
        spoilt = [number for number, one in enumerate(losses) if not isfinite(one) or one > high]
        return {
            "type": "incident",
            "kind": self.check(loss, norm),
            "rank": self._find_responsible_rank(spoilt),
            "operation": f"training step {step + 1}",
            "reason": f"loss {loss}, gradient norm {norm}",
            "time": time.time(),
        }

    def report_incident(self, incident: Record, outcome: str, steps_undone: int) -> None:
        """It is over. `undone`: committed steps that this took back."""
        taken_s, reason = time.time() - incident["time"], f"{incident['reason']}; {outcome}"
        self._emit(incident | {"reason": reason, "recovered_s": taken_s, "steps_lost": steps_undone})

    def _compute_loss_limit(self) -> float:
        return compute_spike_threshold(
            [] if self._recent_losses is None else self._recent_losses.tolist(), self._fault.spike_deviations
        )

    def _record_loss(self, step: int, loss: float) -> None:
        if self._recent_losses is not None:
            self._recent_losses[step % WINDOW] = loss
