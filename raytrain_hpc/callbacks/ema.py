"""Exponential moving average of the weights."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_hpc.callbacks.callback import Callback, ParameterState
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.torch_private import foreach_add_, foreach_mul_, foreach_sub


class EMA(Callback):
    """Exponential moving average of the trainable weights (Polyak and Juditsky 1992), used for evaluation and export.

    After every step, average = decay * average + (1 - decay) * weights. The averages are sharded, saved and resharded
    like the weights; with train.deterministic=elastic they have the same bits on every data-parallel layout.
    Validation losses are those of the averages. `raytrain-hpc generate` and `export` use them unless they are given
    --weights trained.
    """

    def __init__(self, decay: float = 0.999):
        if not 0.0 <= decay < 1.0:
            raise CallbackError(f"EMA: decay={decay}: must be at least 0 and less than 1")
        self._decay, self._num_updates = decay, 0

    def on_generation_start(self) -> None:
        """Allocate the averages."""
        self._averages = ParameterState(
            {name: torch.zeros_like(weight) for name, weight in self.context.parameters.items()}
        )

    @torch.no_grad()
    def pre_train(self) -> None:
        """Start from the weights, unless averages were restored."""
        if self._num_updates == 0:
            for name, weight in self.context.parameters.items():
                self._averages[name].copy_(weight)

    @torch.no_grad()
    def post_step(self, metrics: dict[str, Any]) -> None:
        """Update the averages. Separate operations, so that no bit depends on where a slice begins."""
        averages, weights = list(self._averages.values()), list(self.context.parameters.values())
        if weights:
            differences = foreach_sub(weights, averages)
            foreach_mul_(differences, 1.0 - self._decay)
            foreach_add_(averages, differences)
        self._num_updates += 1

    def pre_eval(self) -> None:
        """Evaluate with the averages."""
        self.context.exchange_weights(self._averages)

    def post_eval(self, metrics: dict[str, Any]) -> None:
        """Train with the weights again."""
        self.context.exchange_weights(self._averages)

    def state_dict(self) -> dict[str, Any]:
        """Return the averages and the number of updates."""
        return {"averaged_weights": self._averages, "num_updates": self._num_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of updates; the averages were filled in place."""
        self._num_updates = state["num_updates"]
