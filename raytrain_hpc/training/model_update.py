"""Changes to the model between two steps: gradient clipping, buffers, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from raytrain_hpc.optim.grad_norm import GradientNorm
from raytrain_hpc.optim.lr_scheduler import LearningRate
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.torch_private import foreach_mul_
from raytrain_hpc.training.running_statistics import RunningStatistics


@dataclass
class ModelUpdate:
    """Update of this rank's part of the model from the gradients of a step.

    `max_grad_norm`: limit of the global gradient norm; 0 disables clipping.
    """

    optimizer: Optimizer
    learning_rate: LearningRate
    gradient_norm: GradientNorm
    running_statistics: RunningStatistics
    max_grad_norm: float
    gradient_nbytes: int = field(default=0, init=False)  # of this rank's gradients, at the last clipping
    _gradients: list[Tensor] = field(default_factory=list, init=False)  # between computing their norm and clipping

    def compute_norm(self, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of the gradients of the mean loss, and the factor that makes clipped ones of summed ones.

        Call after the backward passes. `num_tokens`: valid tokens of the global batch, fp64 scalar. Returns fp64
        scalars on the device. Collective over the ranks that hold one whole state.
        """
        gradients = self.optimizer.get_gradients()
        self._gradients = list(gradients.values())
        self.gradient_nbytes = sum(gradient.nbytes for gradient in gradients.values())
        norm = self.gradient_norm(gradients) / num_tokens
        limit = self.max_grad_norm
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) / num_tokens if limit else 1.0 / num_tokens
        return norm, scale

    def scale_gradients(self, scale: Tensor) -> None:
        """Multiply all gradients by the factor of `compute_norm`."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in self._gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for dtype, gradients in by_dtype.items():
            foreach_mul_(gradients, scale.to(dtype))
        self._gradients = []

    def update_weights(self, step: int) -> None:
        """Run the optimizer with the learning rate of step `step` (0-based), and drop the gradients."""
        self.optimizer.step(self.learning_rate(step))

    def undo_passes(self) -> None:
        """Drop the gradients of a step, and what its passes have changed in running statistics."""
        self.optimizer.zero_grad()
        self.running_statistics.undo_step()

    def sync_buffers(self) -> None:
        """Make running statistics equal on all ranks. Call once per step, after the backward passes."""
        self.running_statistics.sync()
