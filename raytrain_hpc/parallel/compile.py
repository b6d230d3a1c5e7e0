"""Compilation of a model, block by block, so that blocks of one structure share the compiled code.

A block is one graph with its communication (`collective_ops`) and its recomputation, under every layout but three, for
which Python code must run within it: ranks with different experts learn on the host how many rows they exchange,
pipeline schedules that split backward passes defer weight gradients as functions, and FSDP2 gathers each tile of a
tiled layer from a hook. The compiler then splits the block into graphs around that code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.model.moe import Experts, LocalDispatcher, MixtureOfExperts
from raytrain_hpc.parallel.deferred_wgrad import WeightGradStore
from raytrain_hpc.parallel.mesh_axis import Axis
from raytrain_hpc.parallel.tiled_linear import TiledLinear
from raytrain_hpc.torch_private import forget_compiled_sizes, raise_recompile_limits

_VERSIONS_PER_MODEL = 8  # of a function, as many as torch keeps by default


def prepare_compile(axes: Mapping[str, Axis], store: WeightGradStore) -> None:
    """Prepare what the stages of a rank share for torch.compile. Call before `store` is attached to a stage.

    The model is compiled for its sizes, whatever the process has compiled before: else the compiler would generalize
    over the sizes, and would leave functions uncompiled of which it has many versions.
    """
    raise_recompile_limits(_VERSIONS_PER_MODEL)
    forget_compiled_sizes()
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
            submodule.dispatcher = _ExcludedDispatcher(_exclude(dispatcher.start), _exclude(dispatcher.finish))
            is_one_graph = False
        is_one_graph = is_one_graph and not isinstance(submodule, TiledLinear)
    return is_one_graph


@dataclass(frozen=True)
class _ExcludedDispatcher:
    """An expert dispatcher that compiled code calls. The compiler would find methods of a class, and trace them."""

    start: Callable[[Tensor, Tensor], Any]
    finish: Callable[[Experts, Any], Tensor]


def skip_exchanges(modules: Iterable[nn.Module], num_ranks: int) -> None:
    """Let the local experts of each mixture process the rows of this rank, without the other ranks: for a warm-up.

    How many rows a rank receives is known from its peers only. Call after `parallelize`. `num_ranks`: of the "ep" axis.
    """
    for module in modules:
        for mixture in module.modules():
            if isinstance(mixture, MixtureOfExperts) and isinstance(mixture.dispatcher, _ExcludedDispatcher):
                finish = partial(_run_first_expert, num_ranks)
                mixture.dispatcher = _ExcludedDispatcher(_exclude(lambda rows, counts: rows), _exclude(finish))


def _run_first_expert(num_ranks: int, experts: Experts, rows: Tensor) -> Tensor:
    """Return the outputs [n, hidden_size] of the first local expert for all rows [n, hidden_size]."""
    num_groups = len(experts.up) * (num_ranks if experts.activates_groups else 1)  # elastic: by source rank too
    device = rows.device if experts.use_kernel else "cpu"
    outputs: Tensor = experts(rows, torch.tensor([len(rows)] + [0] * (num_groups - 1), device=device))
    return outputs


def _exclude(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code calls instead of tracing it."""
    excluded: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return excluded


def compile_blocks(blocks: Sequence[nn.Module]) -> None:
    """Compile each block by itself. Nothing is compiled before its first pass.

    Compiles what `forward` is now: recomputation that was applied before is part of the graph. Recomputation that is
    applied afterwards runs compiled code again, which blocks of several graphs need.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
