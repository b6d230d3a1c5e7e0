"""Activation recompute: which results of a block's forward pass are kept for its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def apply_activation_checkpointing(blocks: list[nn.Module], policy: str, *, keyed_randomness: bool) -> None:
    """Make each block recompute in backward: "full" keeps its input, "selective" matrix products and attention.

    `keyed_randomness`: the blocks draw random bits from keys passed to them, so that no generator state is saved.
    """
    if policy == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not keyed_randomness}
    if policy == "selective":
        # Units of FSDP2 inside a block mark their gathers for profilers, more often while they recompute.
        profiler = torch.ops.profiler
        SAC_IGNORED_OPS.update(
            (profiler._record_function_enter_new.default, profiler._record_function_exit._RecordFunction)
        )
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _make_policy(_get_expensive_ops()))
    for block in blocks:
        # The forward is replaced, not the module wrapped: names in the state stay those of the model.
        block.forward = _wrap_forward(block.forward, options)  # type: ignore[method-assign]


def _wrap_forward(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of its own: behind a `functools.partial` torch.compile leaves the whole block as it is."""

    def recomputing(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, **options)

    return recomputing


def _get_expensive_ops() -> set[Any]:
    aten = torch.ops.aten
    return {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }


def _make_policy(ops: set[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy
