"""Compilation of a model, block by block, so that blocks of one structure share the compiled code.

A block is one graph with its communication (`collective_ops`) and its recomputation, under every layout but three, for
which Python code must run within it: ranks with different experts learn on the host how many rows they exchange,
pipeline schedules that split backward passes defer weight gradients as functions, and FSDP2 gathers each tile of a
tiled layer from a hook. The compiler then splits the block into graphs around that code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from raytrain_hpc.model.moe import LocalDispatcher, MixtureOfExperts
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.tiled_linear import TiledLinear


def prepare_compile(axes: Mapping[str, Axis], store: WeightGradStore) -> None:
    """Prepare what the stages of a rank share for torch.compile. Call before `store` is attached to a stage."""
    from raytrain_hpc.parallel.collective_ops import set_axes  # registers operators, which other runs do not need

    set_axes(axes)
    store.linear = _exclude(store.linear)  # type: ignore[method-assign]
    store.float8_linear = _exclude(store.float8_linear)  # type: ignore[method-assign]
    # Else the compiler would compile that function too, again for each layer, up to its limit.
    store.linear_forward = _exclude(store.linear_forward)  # type: ignore[method-assign]
    store.grouped_linear = _exclude(store.grouped_linear)  # type: ignore[method-assign]


def make_traceable(module: nn.Module) -> bool:
    """Exclude the code of a stage that cannot be traced, in place. Return whether each of its blocks is one graph.

    Call when all of its parts are in place, before recomputation and data parallelism are applied.
    """
    is_one_graph = True
    for submodule in module.modules():
        if isinstance(submodule, MixtureOfExperts) and not isinstance(submodule.dispatcher, LocalDispatcher):
            dispatcher = submodule.dispatcher
            dispatcher.start, dispatcher.finish = _exclude(dispatcher.start), _exclude(dispatcher.finish)  # type: ignore[method-assign]
            is_one_graph = False
        is_one_graph = is_one_graph and not isinstance(submodule, TiledLinear)
    return is_one_graph


def _exclude(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that compiled code calls instead of tracing it."""
    excluded: Callable[..., Tensor] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return excluded


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block by itself. Nothing is compiled before its first pass.

    Compiles what `forward` is now: recomputation that was applied before is part of the graph. Recomputation that is
    applied afterwards runs compiled code again, which blocks of several graphs need.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
