"""Copies of weights, made once per step: in bf16 instead of a cast in every pass, or rounded as gathered shards are.

A copied weight is a parameter of its module in bf16. The fp32 weight ("master copy of weights": Micikevicius et al.
2018, arXiv 1710.03740) is in no module: gradient sums, the optimizer, checkpoints and snapshots use it. Products read
the same rounded numbers as after a cast, and each gradient is added to an fp32 sum as before: no bit of a run changes.
With copies of all weights, all operations compute with the numbers that FSDP2 gathers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.model.decoder import Decoder, Head
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.float8_linear import is_float8
from raytrain_hpc.parallel.quantized_collectives import round_weight_
from raytrain_hpc.parallel.tensor_parallel import RowParallelLinear
from raytrain_hpc.torch_private import foreach_copy_


class WeightCopies:
    """The copied weights of the stages of a rank. Without any, all methods pass parameters through."""

    def __init__(self) -> None:
        self._weights: dict[Tensor, nn.Parameter] = {}  # by copy
        self._copies: dict[Tensor, nn.Parameter] = {}  # by weight
        self._is_quantized = False

    def replace_weights(self, module: nn.Module, *, include_float8: bool) -> None:
        """Replace the weights that only products in bf16 read by copies, uninitialized, in place.

        `module`: only Decoders have such weights. `include_float8`: also those of products in float8. Call when
        parameters are allocated, before hooks are registered on them.
        """
        if not isinstance(module, Decoder):
            return
        for submodule, name in _iter_product_weights(module, include_float8=include_float8):
            self._replace(submodule, name, torch.bfloat16)

    def replace_all_weights(self, module: nn.Module, dtype: torch.dtype | None, *, is_quantized: bool) -> None:
        """Replace every parameter of any module by a copy, uninitialized, in place. Shared parameters stay shared.

        `dtype`: of the copies, None: that of the parameter. `is_quantized`: copies are rounded as weights that travel
        in 8 bits. Call as `replace_weights`.
        """
        self._is_quantized = is_quantized
        for submodule in list(module.modules()):
            for name, parameter in list(submodule.named_parameters(recurse=False)):
                if parameter.is_floating_point():
                    self._replace(submodule, name, dtype or parameter.dtype)

    def _replace(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        weight = module.get_parameter(name)
        copy = self._copies.get(weight)
        if copy is None:
            data = torch.empty(weight.shape, dtype=dtype, device=weight.device)
            copy = nn.Parameter(data, requires_grad=weight.requires_grad)
            if copy.requires_grad:
                hook = partial(_move_gradient, weight)
                copy.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            self._weights[copy], self._copies[weight] = weight, copy
        module.register_parameter(name, copy)

    def get_weight(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the fp32 weight of a parameter of a module: another tensor if the module has a copy."""
        return self._weights.get(parameter, parameter)

    def get_module_parameter(self, weight: nn.Parameter) -> nn.Parameter:
        """Return the parameter that a module has for a weight: autograd computes its gradient."""
        return self._copies.get(weight, weight)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights. Call before the passes of a step and before an evaluation."""
        if self._weights:
            foreach_copy_(list(self._weights), list(self._weights.values()))
        if self._is_quantized:
            for copy in self._weights:
                round_weight_(copy)

    @torch.no_grad()
    def accumulate(self, parameter: Tensor, grad: Tensor) -> None:
        """Add to the gradient of the weight of a parameter of a module. Call where autograd does not do it."""
        _add_gradient(self._weights.get(parameter, parameter), grad)


def _iter_product_weights(decoder: Decoder, *, include_float8: bool) -> Iterator[tuple[nn.Module, str]]:
    """Yield the weights that only matrix products read, as modules and names of their parameters.

    Not among them: embeddings, also as the weight of a tied head, and routers, which compute in fp32.
    """
    for module in decoder.modules():
        if is_float8(module) and not include_float8:
            continue
        if isinstance(module, nn.Linear | RowParallelLinear | Head) and isinstance(module.weight, nn.Parameter):
            yield module, "weight"
        elif isinstance(module, Experts):
            yield from ((module, name) for name, _ in module.named_parameters())


def _move_gradient(weight: nn.Parameter, copy: Tensor) -> None:
    """Add the gradient of a copy to that of its weight. Called by autograd when it has set `copy.grad`."""
    grad, copy.grad = copy.grad, None
    if grad is not None:
        _add_gradient(weight, grad)


def _add_gradient(weight: Tensor, grad: Tensor) -> None:
    if weight.grad is None:
        # FSDP2 of torch 2.15 accumulates the gradients of bf16 weights in fp32 here, that of 2.13 elsewhere.
        weight.grad = grad.to(weight.grad_dtype or grad.dtype)
    else:
        weight.grad.add_(grad)
