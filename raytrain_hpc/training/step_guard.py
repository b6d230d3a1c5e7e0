"""Guard against steps whose loss or gradient norm is not finite, or whose loss spikes."""

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
from raytrain_hpc.training.loss_reduction import StepTotals

BadStepKind = Literal["not finite", "loss spike"]


class StepGuard:
    """Check of the loss and gradient norm of each step, with the reaction `fault.on_nan`. Equal on all ranks.

    `recent_losses`: losses of the last steps, [WINDOW]; part of the state, so that a resumed run decides in the same
    way. `find_responsible_rank`: returns the lowest rank that computes one of the given microbatches. `rollback(step)`:
    restores the state of an earlier step and returns that step.
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
        """Return the problem of a step's loss and gradient norm; None if they are good."""
        if not (isfinite(loss) and isfinite(grad_norm)):
            return "not finite"
        return "loss spike" if loss > self._compute_loss_limit() else None

    def accept(self, step: int, loss: float) -> None:
        """Accept the step after `step` committed ones, with this loss."""
        self._num_consecutive = 0
        self._record_loss(step, loss)

    def reject(self, step: int, loss: float, grad_norm: float) -> int:
        """Reject a step that was bad twice: skip it or roll back. Return the number of committed steps undone.

        Raises RunFailedError if `fault.on_nan=stop`, or if too many steps in a row were bad (`fault.max_failures`).
        """
        numbers = f"step {step + 1}: loss {loss} and gradient norm {grad_norm}: {self.check(loss, grad_norm)}, twice"
        if self._fault.on_nan == "stop":
            raise RunFailedError(
                f"{numbers}; lower optimizer.lr, check the data, use train.dtype=fp32, or discard such steps with "
                "fault.on_nan=skip or rollback. The newest checkpoint is from before this step"
            )
        self._num_consecutive += 1
        if self._num_consecutive > self._fault.max_failures:
            raise RunFailedError(
                f"{numbers}; {self._num_consecutive} bad steps in a row exceed fault.max_failures="
                f"{self._fault.max_failures}; lower optimizer.lr or check the data"
            )
        steps_undone = 0 if self._fault.on_nan == "skip" else step - self._rollback(step)
        self._record_loss(step, loss)
        return steps_undone

    def build_incident(self, step: int, loss_and_norm: tuple[float, float], totals: StepTotals) -> Record:
        """Build the incident record of a bad step."""
        loss, norm = loss_and_norm
        cause = "" if totals.num_tokens else "no token counts in the loss: "
        limit = self._compute_loss_limit()
        bad_microbatches = [
            number
            for number, microbatch_loss in enumerate(totals.get_microbatch_losses())
            if not isfinite(microbatch_loss) or microbatch_loss > limit
        ]
        return {
            "type": "incident",
            "kind": self.check(loss, norm),
            "rank": self._find_responsible_rank(bad_microbatches),
            "operation": f"training step {step + 1}",
            "reason": f"{cause}loss {loss}, gradient norm {norm}",
            "time": time.time(),
        }

    def report_incident(self, incident: Record, outcome: str, steps_undone: int) -> None:
        """Emit an incident with its outcome. `steps_undone`: committed steps that a rollback discarded."""
        duration_s, reason = time.time() - incident["time"], f"{incident['reason']}; {outcome}"
        self._emit(incident | {"reason": reason, "recovered_s": duration_s, "steps_lost": steps_undone})

    def _compute_loss_limit(self) -> float:
        return compute_spike_threshold(
            [] if self._recent_losses is None else self._recent_losses.tolist(), self._fault.loss_spike_deviations
        )

    def _record_loss(self, step: int, loss: float) -> None:
        if self._recent_losses is not None:
            self._recent_losses[step % WINDOW] = loss
