"""Weight gradients of experts, separate for each rank whose positions they processed.

An expert computes the positions of all ranks of its "ep" axis together. Under `train.deterministic=elastic` their
gradients are added in the order of microbatches, so each rank's positions are multiplied by themselves, which also
gives the bits that they have without expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.grouped_linear import compute_grouped_weight_grad, grouped_linear
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore


class SourceGradients:
    """Weight gradients of a rank's experts in one backward pass, by name and source rank."""

    def __init__(self, num_sources: int, store: WeightGradStore | None):
        """`store`: defers the computation of weight gradients; None: backward passes compute them."""
        self._num_sources, self._store = num_sources, store
        self._gradients: dict[str, list[Tensor]] = {}  # by name, then by source

    def attach(self, module: nn.Module) -> None:
        """Make the experts below a module leave their weight gradients here, in place."""
        for name, submodule in module.named_modules():
            if isinstance(submodule, Experts):
                submodule.grouped_linear = partial(self._grouped_linear, name, submodule)

    def take(self, names: Sequence[str]) -> list[list[Tensor | None]]:
        """Return the gradients of these weights, by source and then by name, and remove them. None: no pass used it."""
        missing: list[Tensor | None] = [None] * self._num_sources
        by_name = [self._gradients.pop(name, missing) for name in names]
        return [[gradients[source] for gradients in by_name] for source in range(self._num_sources)]

    def _grouped_linear(
        self, prefix: str, experts: Experts, rows: Tensor, weight: Tensor, sizes: Tensor, use_kernel: bool
    ) -> Tensor:
        """Compute `model.grouped_linear`, without the kernel. sizes: rows per source and expert, sources first."""
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return grouped_linear(rows, weight, sizes)
        # FSDP2 replaces the attributes of a module: the tensor tells which weight it is.
        name = next(name for name, parameter in experts.named_parameters() if parameter is weight)
        add = partial(self._add_gradients, f"{prefix}.{name}", weight.dtype)
        product: Tensor = _SourceGroupedLinear.apply(rows, weight, sizes, add, self._store)  # type: ignore[no-untyped-call]
        return product

    @torch.no_grad()
    def _add_gradients(self, name: str, dtype: torch.dtype, grad_out: Tensor, rows: Tensor, sizes: Tensor) -> None:
        by_source = sizes.view(self._num_sources, -1)
        rows_per_source = by_source.sum(dim=1).tolist()
        parts = zip(torch.split(grad_out, rows_per_source), torch.split(rows, rows_per_source), by_source, strict=True)
        gradients = [compute_grouped_weight_grad(*part).to(dtype) for part in parts]
        if (earlier := self._gradients.get(name)) is not None:
            raise RuntimeError(f"{name}: {len(earlier)} gradients of another backward pass were not taken")
        self._gradients[name] = gradients


class _SourceGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, sizes: Tensor, add: Any, store: WeightGradStore | None
    ) -> Tensor:
        device = rows.device.type
        compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
        # Keep the weight on ctx: FSDP2 gathers it again for the backward pass.
        ctx.dtypes, ctx.weight, ctx.sizes, ctx.add, ctx.store = (rows.dtype, compute_dtype), weight, sizes, add, store
        rows = rows.to(compute_dtype)
        ctx.save_for_backward(rows)
        return grouped_linear(rows, weight.to(compute_dtype), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        input_dtype, compute_dtype = ctx.dtypes
        compute_weight_grads = partial(ctx.add, gradients[0], rows, ctx.sizes)
        if ctx.store is None:
            compute_weight_grads()
        else:
            ctx.store.put(compute_weight_grads)
        grad_rows = grouped_linear(gradients[0], ctx.weight.to(compute_dtype).transpose(1, 2), ctx.sizes)
        # Zeros, so that hooks and FSDP2 see a gradient.
        placeholder = ctx.weight.new_zeros(()).expand_as(ctx.weight)
        return grad_rows.to(input_dtype), placeholder, None, None, None


def get_source_gradients(
    modules: Mapping[int, nn.Module], num_sources: int, store: WeightGradStore | None
) -> SourceGradients:
    """Return the gradients of the experts of all stages of a rank, which are attached to them."""
    source_gradients = SourceGradients(num_sources, store)
    for module in modules.values():
        source_gradients.attach(module)
    return source_gradients
