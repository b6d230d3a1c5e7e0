"""Optimizer over the slices that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.optim.offload import MomentStorage, OptimizerChunk
from raytrain_hpc.state.sharded_state import to_local
from raytrain_hpc.torch_private import adamw, sgd

MOMENT_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def get_local_slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return this rank's slice of each parameter as a plain tensor."""
    return {name: to_local(parameter).detach() for name, parameter in parameters.items()}


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD on the slices that this rank holds.

    Element-wise kernels on plain local tensors give the same numbers under any sharding, without DTensor dispatch.
    Moments exist from the start, so that every checkpoint has the same tensors. torch's functional optimizers are used,
    since its optimizer classes import TorchDynamo: 2 s and 74 MiB per worker. `storage` holds the moments; `elastic`
    chooses kernels whose bits do not depend on the sharding.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], config: OptimizerConfig, storage: MomentStorage, *, elastic: bool
    ):
        self._parameters, self._config, self._storage = parameters, config, storage
        # The fused kernel treats the last elements of a slice differently, so its bits depend on slice boundaries.
        self._fused = not elastic
        self.moments = storage.moments
        self.set_steps(0)

    def set_steps(self, num_steps: int) -> None:
        """Set the number of steps that the moments have seen, for AdamW's bias correction."""
        self._num_steps = num_steps

    def release_memory(self) -> None:
        """Release the memory that reading or filling moments took."""
        self._storage.release_memory()

    def get_gradients(self) -> dict[str, Tensor]:
        """Return this rank's slice of each gradient. Parameters that the loss did not reach have none."""
        return {  # a rank may hold no row of a small tensor
            name: to_local(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and self._storage.slices[name].numel()
        }

    def step(self, lr: float) -> None:
        """Update every slice with its gradient, then drop the gradients."""
        gradients = self.get_gradients()
        for decayed in (True, False):
            selected = {
                name: gradient for name, gradient in gradients.items() if (self._parameters[name].ndim >= 2) is decayed
            }
            for chunk in self._storage.iter_chunks(selected):
                self._update(chunk, lr, self._config.weight_decay if decayed else 0.0)
        self.skip_step()

    def skip_step(self) -> None:
        """Count a step and drop its gradients without an update."""
        self._num_steps += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _update(self, chunk: OptimizerChunk, lr: float, weight_decay: float) -> None:
        weights, gradients, config = list(chunk.weights), list(chunk.gradients), self._config
        if config.name == "sgd":
            sgd(
                weights,
                gradients,
                [None] * len(weights),
                lr=lr,
                weight_decay=weight_decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        # The kernel increments the counts that it is given, and a tensor can be in several chunks.
        counts = torch.full((len(weights),), float(self._num_steps), dtype=torch.float32, device=weights[0].device)
        adamw(
            weights,
            gradients,
            list(chunk.moments["exp_avg"]),
            list(chunk.moments["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            fused=self._fused,
            foreach=not self._fused,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=config.eps,
            maximize=False,
        )
