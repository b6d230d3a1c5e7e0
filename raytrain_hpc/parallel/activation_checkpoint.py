"""Activation checkpointing: recompute the activations of a block in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from raytrain_hpc.model.decoder import Block
from raytrain_hpc.torch_private import (
    grouped_mm_op,
    ignore_profiler_ops_in_recomputation,
    is_persistent_buffer,
    scaled_mm_op,
    sdpa_cpu,
    sdpa_cudnn,
    sdpa_efficient,
    sdpa_flash,
)


def apply_activation_checkpointing(
    blocks: Sequence[nn.Module], policy: str, *, keyed_randomness: bool, num_blocks: int = 0
) -> None:
    """Apply activation checkpointing to the first `num_blocks` blocks of a stage, 0: to all, in place.

    The first ones, since their backward passes come last: they are recomputed when the memory of the others is free.
    `policy`: "none": keep all activations; "full": keep only the input of a block; "selective": also keep the outputs
    of matrix products and attention. `keyed_randomness`: dropout draws its bits from keys that are inputs of the block,
    so no generator state is saved.
    """
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not keyed_randomness}
    if policy == "selective":
        ignore_profiler_ops_in_recomputation()
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _make_policy(_get_expensive_ops()))
    for block in blocks[: num_blocks or None]:
        own = dict(options)
        if buffers := _list_running_statistics(block):
            own["context_fn"] = partial(_make_contexts, options.get("context_fn"), buffers)
        # Replace the forward instead of wrapping the module, which would change the names of its parameters.
        block.forward = _wrap_forward(block.forward, own)  # type: ignore[method-assign]


def _list_running_statistics(block: nn.Module) -> list[Tensor]:
    """Return the persistent buffers of a user's block, which its forward pass may update."""
    if isinstance(block, Block):
        return []
    return [
        buffer
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if is_persistent_buffer(module, name)
    ]


def _make_contexts(
    make: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None, buffers: list[Tensor]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward pass and of its recomputation, which leaves the buffers as they are."""
    forward, recomputation = (nullcontext(), nullcontext()) if make is None else make()
    return forward, _restore_buffers(recomputation, buffers)


@contextmanager
def _restore_buffers(context: AbstractContextManager[Any], buffers: list[Tensor]) -> Iterator[None]:
    values = [buffer.clone() for buffer in buffers]
    try:
        with context:
            yield
    finally:  # torch ends a recomputation early by an exception
        for buffer, value in zip(buffers, values, strict=True):
            buffer.data.copy_(value)  # through `data`: autograd has saved the buffer, and would refuse a changed one


def _wrap_forward(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that runs `forward` under checkpoint.

    A closure, since torch.compile does not compile a block whose forward is a `functools.partial`.
    """

    def checkpointed_forward(*inputs: Any, **keywords: Any) -> Any:
        return checkpoint(forward, *inputs, **options, **keywords)

    return checkpointed_forward


# Of attention, by name: they exist only in runs that use them.
_ATTENTION_OPERATORS = ("raytrain_hpc::document_attend", "raytrain_hpc::ring_attend")


def _get_expensive_ops() -> set[Any]:
    aten = torch.ops.aten
    return {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        scaled_mm_op,
        grouped_mm_op,
        sdpa_flash.default,
        sdpa_cpu.default,
        sdpa_efficient.default,
        sdpa_cudnn.default,
    }


def _make_policy(ops: set[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_expensive = op in ops or op.name() in _ATTENTION_OPERATORS
        return CheckpointPolicy.MUST_SAVE if is_expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
