"""The optimizer over what this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from raytrain_hpc.config import TrainConfig
from raytrain_hpc.state.holding import local


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD, stepping each rank's own slices as plain tensors.

    Element-wise kernels on plain local tensors give the same numbers for any sharding and pay no DTensor dispatch.
    Moments exist from the start, so that the state has one shape from the first checkpoint on. These are torch's
    functional forms: its optimizer classes import TorchDynamo, 2 s and 74 MiB a worker.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig):
        self._parameters, self._train = parameters, train
        self._slices = {name: local(p.detach()) for name, p in parameters.items()}
        kinds = () if train.optimizer == "sgd" else ("exp_avg", "exp_avg_sq")
        self.moments = {kind: {name: torch.zeros_like(s) for name, s in self._slices.items()} for kind in kinds}
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """State how many steps the moments have seen (AdamW's bias correction)."""
        self._counts = {
            name: torch.tensor(float(steps), dtype=torch.float32, device=s.device) for name, s in self._slices.items()
        }

    def gradients(self) -> dict[str, Tensor]:
        """This rank's slice of every gradient. A parameter that the loss did not reach has none."""
        return {  # a rank can hold no row of a small tensor
            name: local(parameter.grad)
            for name, parameter in self._parameters.items()
            if parameter.grad is not None and self._slices[name].numel()
        }

    def step(self, rate: float) -> None:
        """Step every slice with the gradients now on the parameters, then drop the gradients."""
        gradients = self.gradients()
        for decayed in (True, False):
            names = [name for name in gradients if (self._parameters[name].ndim >= 2) is decayed]
            if names:
                decay = self._train.weight_decay if decayed else 0.0
                self._update(names, [gradients[name] for name in names], rate, decay)
        for name, parameter in self._parameters.items():
            if name not in gradients:
                self._counts[name] += 1  # all counts are the step, which is what a checkpoint knows of them
            parameter.grad = None

    @torch.no_grad()
    def _update(self, names: list[str], gradients: list[Tensor], rate: float, decay: float) -> None:
        weights, train = [self._slices[name] for name in names], self._train
        if train.optimizer == "sgd":
            sgd(
                weights,
                gradients,
                [None] * len(names),
                lr=rate,
                weight_decay=decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        adamw(
            weights,
            gradients,
            [self.moments["exp_avg"][name] for name in names],
            [self.moments["exp_avg_sq"][name] for name in names],
            [],
            [self._counts[name] for name in names],
            fused=True,
            amsgrad=False,
            beta1=train.beta1,
            beta2=train.beta2,
            lr=rate,
            weight_decay=decay,
            eps=train.eps,
            maximize=False,
        )
