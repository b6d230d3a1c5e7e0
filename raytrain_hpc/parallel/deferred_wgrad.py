"""Products whose weight gradients are computed later than the gradients of their inputs.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) fill waiting time with them. The product itself puts its weight
gradient aside, so one ordinary backward pass runs, with its hooks, recompute and gathered weights; a later gradient
needs only the product's input and the gradient of its output, no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.moe import Experts, grouped_linear

WeightGradFn = Callable[[], None]


class WeightGradStore:
    """Collects what backward passes put aside."""

    def __init__(self) -> None:
        self._pending: list[WeightGradFn] = []

    def pop_all(self) -> list[WeightGradFn]:
        """All that was put aside since the last call; each adds a gradient to its weight."""
        taken, self._pending = self._pending, []
        return taken

    def put(self, weight_grad: WeightGradFn) -> None:
        """Put something aside."""
        self._pending.append(weight_grad)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`, the gradient of a weight that is a parameter put aside."""
        if not (torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad):
            return F.linear(x, weight, bias)
        product: Tensor = _DeferredLinear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias.to(product.dtype)

    def grouped_linear(self, rows: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        """`model.experts.grouped_linear`, the gradient of the weight put aside."""
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return grouped_linear(rows, weight, sizes)
        product: Tensor = _DeferredGroupedLinear.apply(rows, weight, list(sizes), self)  # type: ignore[no-untyped-call]
        return product

    def attach(self, module: nn.Module) -> None:
        """Make every product of a module such a one: its linear layers, and what names its product `product`."""
        for part in module.modules():
            if type(part) is nn.Linear:
                part.forward = partial(_linear_forward, self, part)  # type: ignore[method-assign]
            elif hasattr(part, "product"):
                part.product = self.linear  # type: ignore[assignment]
            elif isinstance(part, Experts):
                part.grouped_linear = self.grouped_linear


def _linear_forward(store: WeightGradStore, layer: nn.Linear, x: Tensor) -> Tensor:
    return store.linear(x, layer.weight, layer.bias)


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, store: WeightGradStore) -> Tensor:
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        # The weight is not saved as tensors are: recompute would hand back another one, without its gradient.
        ctx.kinds, ctx.deferral, ctx.weight = (x.dtype, kind), store, weight
        x = x.to(kind)
        ctx.save_for_backward(x)
        return F.linear(x, weight.to(kind))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        outer, kind = ctx.kinds
        gradient = gradients[0]
        ctx.deferral.put(partial(_add_weight_grad, ctx.weight, gradient, x))
        return (gradient @ ctx.weight.to(kind)).to(outer), None, None


class _DeferredGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: list[int], store: WeightGradStore) -> Tensor:
        kind = torch.get_autocast_dtype(rows.device.type) if torch.is_autocast_enabled(rows.device.type) else rows.dtype
        ctx.kinds, ctx.deferral, ctx.weight, ctx.sizes = (rows.dtype, kind), store, weight, sizes
        rows = rows.to(kind)
        ctx.save_for_backward(rows)
        return grouped_linear(rows, weight.to(kind), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        outer, kind = ctx.kinds
        gradient = gradients[0]
        ctx.deferral.put(partial(_add_grouped_weight_grad, ctx.weight, gradient, rows, ctx.sizes))
        back = ctx.weight.to(kind).transpose(1, 2)
        return grouped_linear(gradient, back, ctx.sizes).to(outer), None, None, None


@torch.no_grad()
def _add_weight_grad(weight: Tensor, grad_out: Tensor, x: Tensor) -> None:
    _accumulate(weight, grad_out.flatten(0, -2).t() @ x.flatten(0, -2))


@torch.no_grad()
def _add_grouped_weight_grad(weight: Tensor, grad_out: Tensor, rows: Tensor, sizes: list[int]) -> None:
    runs = zip(torch.split(grad_out, sizes), torch.split(rows, sizes), strict=True)
    _accumulate(weight, torch.stack([of_output.t() @ of_input for of_output, of_input in runs]))


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    grad = grad.to(weight.dtype)
    weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
