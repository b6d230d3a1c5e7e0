"""All private or undocumented names of FSDP2 that the package uses; see torch_private.py.

FSDP2 is imported when a function needs it: it takes 40 MiB in workers that do not use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def cast_inputs_to_bf16(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast floating-point inputs of a module, also within containers, as FSDP2 does with `param_dtype=bf16`.

    A forward pre-hook. `_apply_to_tensors`: all versions.
    """
    from torch.distributed.utils import _apply_to_tensors

    apply: Any = _apply_to_tensors
    cast_args, cast_kwargs = apply(_to_bf16, (args, kwargs))
    return cast_args, cast_kwargs


def _to_bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


@contextmanager
def reshard_over_inner_dimension(mesh: DeviceMesh | None) -> Iterator[None]:
    """Make calls of `fully_shard` within keep weights sharded over the last dimension of `mesh` after a forward pass.

    `mesh`: two dimensions, of all ranks. None: nothing changes. Of `reshard_after_forward=n`, torch makes a mesh with
    groups per module out of the module's own mesh: collectives of all ranks that not all ranks call, if that mesh is
    only a part of them. `_get_post_forward_mesh_info`, `HSDPMeshInfo`: all versions.
    """
    if mesh is None:
        yield
        return
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo

    implementation: Any = _fully_shard
    info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    get_mesh_info = implementation._get_post_forward_mesh_info
    implementation._get_post_forward_mesh_info = lambda *_: info
    try:
        yield
    finally:
        implementation._get_post_forward_mesh_info = get_mesh_info


def get_fsdp_collectives_file() -> str:
    """Return the source file of FSDP2's collectives, in which a rank waits, without importing it. All versions."""
    return str(Path(dist.__file__).parent / "fsdp" / "_fully_shard" / "_fsdp_collectives.py")


def run_fsdp_post_backward(root: FSDPModule) -> None:
    """Run the post-backward function of every parameter group below an FSDP2 root again, as its settings say.

    Call after gradients were added outside of a backward pass, as torch's pipeline runtime does: FSDP2 accumulates
    them or, if `set_requires_gradient_sync` is on, reduces them. The public `finalize_backward` (2.15) also waits for
    the reduction, which would keep it from overlapping with the next microbatch, and refuses partial sums of HSDP.
    `fully_shard.state`, `_state_ctx` and `post_backward`: all versions. `_fsdp_param_groups`: not 2.11, which has one
    group, `_fsdp_param_group`.
    """
    for state in _get_fsdp_state(root)._state_ctx.all_states:
        for group in _get_fsdp_param_groups(state):
            group.post_backward()


FSDPGrads = list[tuple[Any, torch.Tensor]]  # parameter of FSDP2, its whole gradient


def take_fsdp_grads(root: FSDPModule) -> FSDPGrads:
    """Return the unreduced gradients of the parameters below an FSDP2 root, and remove them.

    Call after a backward pass without reduction. `unsharded_accumulated_grad`, `_unsharded_param`: all versions.
    """
    taken: FSDPGrads = []
    for state in _get_fsdp_state(root)._state_ctx.all_states:
        for group in _get_fsdp_param_groups(state):
            for parameter in group.fsdp_params:
                gradient = parameter.unsharded_accumulated_grad
                parameter.unsharded_accumulated_grad = None
                if gradient is None and hasattr(parameter, "_unsharded_param"):
                    gradient, parameter._unsharded_param.grad = parameter._unsharded_param.grad, None
                if gradient is not None:
                    taken.append((parameter, gradient))
    return taken


def add_fsdp_grads(grads: FSDPGrads) -> None:
    """Add gradients to the unreduced ones of FSDP2, which `take_fsdp_grads` has removed."""
    for parameter, gradient in grads:
        if parameter.unsharded_accumulated_grad is not None:
            parameter.unsharded_accumulated_grad += gradient
        elif parameter._unsharded_param.grad is not None:
            parameter._unsharded_param.grad += gradient
        elif gradient.dtype == parameter._unsharded_param.dtype:
            parameter._unsharded_param.grad = gradient
        else:
            parameter.unsharded_accumulated_grad = gradient


def on_fsdp_post_backward(module: FSDPModule, on_gradient: Callable[[nn.Parameter], None]) -> list[nn.Parameter]:
    """Make FSDP2 reduce zeros for trainable parameters of a module that a backward pass leaves without a gradient.

    `on_gradient`: called with each parameter that has one, in each backward pass. Returns the trainable parameters,
    without those of FSDP2 modules inside. `set_reduce_scatter_unused_params` does the same, but not in 2.11, and for
    modules that stay gathered it reduces zeros once more. `post_backward`, `reduce_grads`, `_training_state`,
    `unsharded_accumulated_grad` and `_unsharded_param`: all versions.
    """
    groups = _get_fsdp_param_groups(_get_fsdp_state(module))
    for group in groups:
        group.post_backward = partial(_fill_and_run_post_backward, weakref.ref(group), on_gradient)
    return [p.sharded_param for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]


def _fill_and_run_post_backward(
    group_ref: weakref.ref[Any], on_gradient: Callable[[nn.Parameter], None], *unused: Any
) -> None:
    group: Any = group_ref()
    is_first_call = group._training_state.name == "PRE_BACKWARD"  # later ones find gradients reduced
    for parameter in group.fsdp_params:
        weight = getattr(parameter, "_unsharded_param", None)
        if weight is None or not weight.requires_grad:
            continue
        if weight.grad is not None or parameter.unsharded_accumulated_grad is not None:
            on_gradient(parameter.sharded_param)
        elif is_first_call and group.reduce_grads:
            weight.grad = torch.zeros_like(weight)
    type(group).post_backward(group, *unused)


def end_fsdp_backward(root: FSDPModule) -> None:
    """Run the function that FSDP2 calls at the end of a backward pass of a root: it waits if that pass is the last.

    Call after `run_fsdp_post_backward` with reduction, within the passes that `set_is_last_backward(False)` leaves
    open: 2.15 refuses the call after a last pass. `_root_post_backward_final_callback`: all versions.
    """
    _get_fsdp_state(root)._root_post_backward_final_callback()


def list_fsdp_shards(module: FSDPModule) -> list[tuple[nn.Module, str, torch.Size]]:
    """Return owner, name and shape of each shard, with padding, in the order in which FSDP2 gathers them.

    Without the parameters of FSDP2 modules inside. `_module_info`, `padded_sharded_param_size`: all versions.
    """
    return [
        (info.module, info.param_name, parameter.padded_sharded_param_size)
        for group in _get_fsdp_param_groups(_get_fsdp_state(module))
        for parameter in group.fsdp_params
        for info in (parameter._module_info,)
    ]


def _get_fsdp_state(module: FSDPModule) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard.state(module)  # type: ignore[attr-defined]


def _get_fsdp_param_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # 2.11
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
