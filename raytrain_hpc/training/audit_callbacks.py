"""Callbacks that compare the state of a rank for audits, before and after what callbacks of the user change."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.training.step_audits import StepAudits


class UpdatedState(Callback):
    """Comparison of the state after the update of an audited step with what was verified."""

    priority = 99  # before callbacks of the user, which may change the state

    def __init__(self, audits: StepAudits):
        self._audits = audits

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Compare the state of this rank. Nothing is communicated: if a rank is lost now, others have the state."""
        self._audits.compare_updated_state()

    def post_commit(self, metrics: dict[str, Any]) -> None:
        """Raise StateChangedError on all ranks if the state of one differs after an audited step."""
        if self._audits.is_due(self.context.step - 1):
            self._audits.check_updated_state(self.context.step - 1)


class StateHashes(Callback):
    """Hashes of the state before a step that is audited: after the step before, or at the start of a generation."""

    priority = -200  # after all callbacks that change the state

    def __init__(self, audits: StepAudits):
        self._audits = audits

    def pre_train(self) -> None:
        """Hash the state if the first step is audited."""
        self._record_if_due()

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Hash the state if the next step is audited."""
        self._record_if_due()

    def _record_if_due(self) -> None:
        if self._audits.is_due(self.context.step):
            self._audits.memory.record_state()
