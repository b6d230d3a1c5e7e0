"""Changes to the model between two steps: gradient clipping, buffers, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

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

    def clip_gradients(self, num_tokens: Tensor) -> Tensor:
        """Scale summed gradients to those of the mean loss and clip them by their global norm.

        Call after the backward passes. `num_tokens`: valid tokens of the global batch, fp64 scalar. Returns the norm
        before clipping, fp64 scalar on the device. Collective over the ranks that hold one whole state.
        """
        gradients = self.optimizer.get_gradients()
        self.gradient_nbytes = sum(gradient.nbytes for gradient in gradients.values())
        norm = self.gradient_norm(gradients) / num_tokens
        limit = self.max_grad_norm
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) / num_tokens if limit else 1.0 / num_tokens
        if gradients:
            slices = list(gradients.values())
            foreach_mul_(slices, scale.to(slices[0].dtype))
        return norm

    def update_weights(self, step: int) -> None:
        """Run the optimizer with the learning rate of step `step` (0-based), and drop the gradients."""
        self.optimizer.step(self.learning_rate(step))

    def sync_buffers(self) -> None:
        """Make running statistics equal on all ranks. Call once per step, after the backward passes."""
        self.running_statistics.sync()
