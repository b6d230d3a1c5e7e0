"""Linear layers whose weight gradients are deferred, for pipeline schedules that split the backward pass.

Zero-bubble schedules (Qi et al. 2023, arXiv 2401.10241) compute weight gradients in pipeline bubbles. Each linear layer
stores a function for its weight gradient during an ordinary backward pass, so hooks, recomputation and FSDP2 work
unchanged. The deferred function needs the input and the output gradient of the layer, but not its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.grouped_linear import compute_grouped_weight_grad, grouped_linear
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.float8_linear import (
    Float8Tensor,
    compute_input_grad,
    compute_output,
    compute_weight_grad,
    float8_linear,
    is_float8,
    quantize_grad,
    quantize_input,
    restore_shape,
)
from raytrain_hpc.parallel.weight_copies import WeightCopies

WeightGradFn = Callable[[], None]
AccumulateFn = Callable[[Tensor, Tensor], None]  # adds a gradient to that of a weight


class WeightGradStore:
    """A store of weight gradients that backward passes have deferred."""

    def __init__(self, weight_copies: WeightCopies | None = None) -> None:
        """`weight_copies`: those of the stages that the store is attached to."""
        self.accumulate: AccumulateFn = (weight_copies or WeightCopies()).accumulate
        self._pending: list[WeightGradFn] = []

    def pop_all(self) -> list[WeightGradFn]:
        """Return and remove the deferred functions. Each adds one gradient to its weight when called."""
        weight_grads, self._pending = self._pending, []
        return weight_grads

    def put(self, weight_grad: WeightGradFn) -> None:
        """Store a function that adds one gradient to its weight."""
        self._pending.append(weight_grad)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `F.linear` and defer the gradient of the weight if it is a trainable leaf tensor."""
        if not _is_trainable_leaf(weight):
            return F.linear(x, weight, bias)
        product: Tensor = _DeferredLinear.apply(x, weight, bias, self)  # type: ignore[no-untyped-call]
        return product

    def float8_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `parallel.float8_linear.float8_linear` and defer the gradient of a weight like `linear`."""
        if not _is_trainable_leaf(weight):
            return float8_linear(x, weight, bias)
        product: Tensor = _DeferredFloat8Linear.apply(x, weight, self)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias.to(product.dtype)

    def linear_forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Compute the output of a layer and defer the gradient of its weight."""
        linear = self.float8_linear if is_float8(layer) else self.linear
        return linear(x, layer.weight, layer.bias)

    def grouped_linear(self, rows: Tensor, weight: Tensor, sizes: Tensor, use_kernel: bool) -> Tensor:
        """Compute `model.grouped_linear` and defer the gradient of the weight."""
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return grouped_linear(rows, weight, sizes, use_kernel)
        product: Tensor = _DeferredGroupedLinear.apply(rows, weight, sizes, use_kernel, self)  # type: ignore[no-untyped-call]
        return product

    def attach(self, module: nn.Module) -> None:
        """Defer the weight gradients of linear layers, experts and submodules with a `product` attribute, in place."""
        for submodule in module.modules():
            if type(submodule) is nn.Linear and submodule.weight is not None:  # else its tiles compute the product
                submodule.forward = partial(self.linear_forward, submodule)  # type: ignore[method-assign]
            elif hasattr(submodule, "product"):
                submodule.product = self.float8_linear if is_float8(submodule) else self.linear  # type: ignore[assignment]
            elif isinstance(submodule, Experts) and submodule.grouped_linear is grouped_linear:
                submodule.grouped_linear = self.grouped_linear


def _is_trainable_leaf(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and weight.is_leaf and weight.requires_grad


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore) -> Tensor:
        compute_dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        # Keep the weight on ctx: with save_for_backward, recomputation would return another tensor, without its
        # gradient.
        ctx.dtypes, ctx.store, ctx.weight = (x.dtype, compute_dtype), store, weight
        ctx.bias_dtype = None if bias is None else bias.dtype
        x = x.to(compute_dtype)
        ctx.save_for_backward(x)
        return F.linear(x, weight.to(compute_dtype), None if bias is None else bias.to(compute_dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        input_dtype, compute_dtype = ctx.dtypes
        grad_out = gradients[0]
        ctx.store.put(partial(_add_weight_grad, ctx.store.accumulate, ctx.weight, grad_out, x))
        grad_bias = grad_out.flatten(0, -2).sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return (grad_out @ ctx.weight.to(compute_dtype)).to(input_dtype), None, grad_bias, None


class _DeferredFloat8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, store: WeightGradStore) -> Tensor:
        quantized = quantize_input(x)
        ctx.dtype, ctx.store, ctx.weight = x.dtype, store, weight  # as in _DeferredLinear
        ctx.save_for_backward(*quantized)
        return restore_shape(compute_output(quantized, weight), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        grad_out = quantize_grad(gradients[0])
        accumulate, x = ctx.store.accumulate, Float8Tensor(*ctx.saved_tensors)
        ctx.store.put(partial(_add_float8_weight_grad, accumulate, ctx.weight, grad_out, x))
        return restore_shape(compute_input_grad(grad_out, ctx.weight), gradients[0]).to(ctx.dtype), None, None


class _DeferredGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor, use_kernel: bool, store: WeightGradStore
    ) -> Tensor:
        compute_dtype = (
            torch.get_autocast_dtype(rows.device.type) if torch.is_autocast_enabled(rows.device.type) else rows.dtype
        )
        ctx.dtypes, ctx.store, ctx.weight, ctx.use_kernel = (rows.dtype, compute_dtype), store, weight, use_kernel
        rows = rows.to(compute_dtype)
        ctx.save_for_backward(rows, sizes)
        return grouped_linear(rows, weight.to(compute_dtype), sizes, use_kernel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, sizes = ctx.saved_tensors
        input_dtype, compute_dtype = ctx.dtypes
        grad_out = gradients[0]
        operands = (ctx.weight, grad_out, rows, sizes, ctx.use_kernel)
        ctx.store.put(partial(_add_grouped_weight_grad, ctx.store.accumulate, *operands))
        transposed = ctx.weight.to(compute_dtype).transpose(1, 2)
        grad_rows = grouped_linear(grad_out, transposed, sizes, ctx.use_kernel)
        return grad_rows.to(input_dtype), None, None, None, None


@torch.no_grad()
def _add_weight_grad(accumulate: AccumulateFn, weight: Tensor, grad_out: Tensor, x: Tensor) -> None:
    accumulate(weight, grad_out.flatten(0, -2).t() @ x.flatten(0, -2))


@torch.no_grad()
def _add_float8_weight_grad(accumulate: AccumulateFn, weight: Tensor, grad_out: Float8Tensor, x: Float8Tensor) -> None:
    accumulate(weight, compute_weight_grad(grad_out, x))


@torch.no_grad()
def _add_grouped_weight_grad(
    accumulate: AccumulateFn, weight: Tensor, grad_out: Tensor, rows: Tensor, sizes: Tensor, use_kernel: bool
) -> None:
    accumulate(weight, compute_grouped_weight_grad(grad_out, rows, sizes, use_kernel))
