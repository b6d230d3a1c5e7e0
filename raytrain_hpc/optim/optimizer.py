"""The optimizer over what this rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from raytrain_hpc.config.schema import TrainConfig
from raytrain_hpc.optim.offload import MomentStorage, OptimizerChunk
from raytrain_hpc.state.sharded_state import to_local

MOMENT_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def get_local_slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """What this rank stores of each parameter, as plain tensors."""
    return {name: to_local(parameter).detach() for name, parameter in parameters.items()}


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD, stepping each rank's own slices as plain tensors.

    Element-wise kernels on plain local tensors give the same numbers for any sharding and pay no DTensor dispatch.
    Moments exist from the start, so that the state has one shape from the first checkpoint on. These are torch's
    functional forms: its optimizer classes import TorchDynamo, 2 s and 74 MiB a worker. Where moments live is `home`'s.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig, storage: MomentStorage):
        self._parameters, self._train, self._storage = parameters, train, storage
        self.moments = storage.moments
        self.set_steps(0)

    def set_steps(self, num_steps: int) -> None:
        """State how many steps the moments have seen (AdamW's bias correction)."""
        self._num_steps = num_steps

    def release_memory(self) -> None:
        """Moments were read or filled: give back memory that this took."""
        self._storage.release_memory()

    def get_gradients(self) -> dict[str, Tensor]:
        """This rank's slice of every gradient. A parameter that the loss did not reach has none."""
        return {  # a rank can hold no row of a small tensor
            name: to_local(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and self._storage.slices[name].numel()
        }

    def step(self, lr: float) -> None:
        """Step every slice with the gradients now on the parameters, then drop the gradients."""
        gradients = self.get_gradients()
        for decayed in (True, False):
            chosen = {name: one for name, one in gradients.items() if (self._parameters[name].ndim >= 2) is decayed}
            for part in self._storage.iter_chunks(chosen):
                self._update(part, lr, self._train.weight_decay if decayed else 0.0)
        self.skip_step()

    def skip_step(self) -> None:
        """Count a step, whose gradients have been used or are not to be."""
        self._num_steps += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients now on the parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def _update(self, chunk: OptimizerChunk, lr: float, weight_decay: float) -> None:
        weights, gradients, train = list(chunk.weights), list(chunk.gradients), self._train
        if train.optimizer == "sgd":
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
        # The kernel adds one to every count that it is given, and a tensor can come in several parts.
        counts = torch.full((len(weights),), float(self._num_steps), dtype=torch.float32, device=weights[0].device)
        adamw(
            weights,
            gradients,
            list(chunk.moments["exp_avg"]),
            list(chunk.moments["exp_avg_sq"]),
            [],
            list(counts.unbind()),
            # The fused kernel treats the last elements of a slice apart, so its bits depend on where slices are cut.
            fused=train.deterministic != "elastic",
            foreach=train.deterministic == "elastic",
            amsgrad=False,
            beta1=train.beta1,
            beta2=train.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=train.eps,
            maximize=False,
        )
