"""The optimizer over what this rank holds, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.config import TrainConfig


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank stores, without a copy."""
    to_local = getattr(tensor, "to_local", None)  # a DTensor's; importing the class would cost 40 MiB
    return tensor if to_local is None else to_local()


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD, stepping each rank's own slices as plain tensors.

    Element-wise kernels on plain local tensors give the same numbers for any sharding and pay no DTensor dispatch.
    Moments exist from the start, so that the state has one shape from the first checkpoint on.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], train: TrainConfig):
        self._parameters = parameters
        self._slices = {name: nn.Parameter(local(p.detach())) for name, p in parameters.items()}
        held = {name: s for name, s in self._slices.items() if s.numel()}  # a rank can hold no row of a small tensor
        decayed = [s for name, s in held.items() if parameters[name].ndim >= 2]
        plain = [s for name, s in held.items() if parameters[name].ndim < 2]
        groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        self._torch: torch.optim.Optimizer | None = None
        self.moments: dict[str, dict[str, Tensor]] = {}
        if train.optimizer == "sgd":
            self._torch = torch.optim.SGD(groups, lr=0.0) if groups else None
            return
        if groups:
            self._torch = torch.optim.AdamW(groups, lr=0.0, betas=(train.beta1, train.beta2), eps=train.eps, fused=True)
        for kind in ("exp_avg", "exp_avg_sq"):
            self.moments[kind] = {name: torch.zeros_like(s) for name, s in self._slices.items()}
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """State how many steps the moments have seen (AdamW's bias correction)."""
        if self._torch is None or not self.moments:
            return
        for name, s in self._slices.items():
            if s.numel():
                count = torch.tensor(float(steps), dtype=torch.float32, device=s.device)
                self._torch.state[s] = {"step": count} | {kind: self.moments[kind][name] for kind in self.moments}

    def gradients(self) -> list[Tensor]:
        """This rank's slices of all gradients. A parameter that the loss did not reach has none."""
        return [grad for _, grad in self._with_gradients()]

    def step(self, rate: float) -> None:
        """Step every slice with the gradients now on the parameters, then drop the gradients."""
        for s, grad in self._with_gradients():
            s.grad = grad
        if self._torch is not None:
            for group in self._torch.param_groups:
                group["lr"] = rate
            self._torch.step()
        for name, parameter in self._parameters.items():
            self._slices[name].grad = None
            parameter.grad = None

    def _with_gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and self._slices[name].numel():
                yield self._slices[name], local(parameter.grad)


def global_norm(gradients: list[Tensor], group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Euclidean norm over all gradients; `group` holds the other slices of the same gradients. fp64 scalar.

    Squares are added in fp64 across tensors and ranks, so that the norm depends on the sharding by rounding only.
    """
    if gradients:
        total = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total.sqrt()
