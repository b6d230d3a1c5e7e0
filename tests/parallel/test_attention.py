"""Blockwise and context-parallel attention against dense attention in fp64, on CPU and GPU."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.model.decoder import causal_attention
from raytrain_hpc.parallel import blockwise_attention, ring_attention
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward, merge_blocks
from raytrain_hpc.parallel.context_parallel import ContextParallelAttention, get_rank_positions
from raytrain_hpc.parallel.ring_attention import Ring, Rotation
from raytrain_hpc.planner.layout import Layout
from tests.parallel.host_staged_collectives import stage_collectives
from tests.warm_pool import WarmPool, make_small_config

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
BOUNDS = {
    "float64": 1e-14,
    "float32": 2e-6,
    "bfloat16": 1.5e-2,
}  # relative, by the norm; the rounding error of bf16 is at most 4e-3
BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 6, 2, 94, 64


def make_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return random queries, keys, values and output gradients in fp64, and documents."""
    generator = torch.Generator().manual_seed(7)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors = [
        torch.randn(BATCH, num_heads, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for num_heads in heads
    ]
    ends = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    return tensors[0], tensors[1], tensors[2], tensors[3], ends.cumsum(1)


def run_dense_attention(dtype: torch.dtype, documents: Tensor | None) -> list[Tensor]:
    """Return the output and input gradients of dense attention, of inputs rounded to `dtype`."""
    *tensors, _ = make_inputs()
    q, k, v, grad_out = (x.to(dtype).double() for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = causal_attention(*inputs, documents)
    out.backward(grad_out)
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the relative error, by the norm."""
    return float((result.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("device", DEVICES)
def test_merged_blocks_of_keys_equal_dense_attention(device: str, dtype: str, packed: bool) -> None:
    """Late queries attend to all early keys and causally to late ones, in separate calls, as in ring attention."""
    *tensors, documents = make_inputs()
    q, k, v, grad_out = (x.to(device, getattr(torch, dtype)) for x in tensors)
    half = LENGTH // 2
    early, late = slice(0, half), slice(half, None)
    visible = (documents[:, None, :, None] == documents[:, None, None, :]).to(device) if packed else None

    def block_mask(queries: slice, keys: slice) -> BlockMask:
        return BlockMask(queries == keys, None if visible is None else visible[:, :, queries, keys])

    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device, dtype=wide)
    out[:, :, early], lse[:, :, early] = attend(*(x[:, :, early] for x in (q, k, v)), block_mask(early, early))
    late_block = attend(*(x[:, :, late] for x in (q, k, v)), block_mask(late, late))
    early_block = attend(q[:, :, late], k[:, :, early], v[:, :, early], block_mask(late, early))
    merged, lse[:, :, late] = merge_blocks(
        late_block[0].to(wide), late_block[1], early_block[0].to(wide), early_block[1]
    )
    out[:, :, late] = merged.to(q.dtype)
    gradients = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for queries, keys in ((early, early), (late, late), (late, early)):
        inputs = [x[:, :, queries] for x in (grad_out, q)], [x[:, :, keys] for x in (k, v)]
        block_grads = attend_backward(
            *inputs[0], *inputs[1], out[:, :, queries], lse[:, :, queries], block_mask(queries, keys)
        )
        for gradient, block_grad, block_slice in zip(gradients, block_grads, (queries, keys, keys), strict=True):
            gradient[:, :, block_slice] += block_grad
    expected = run_dense_attention(getattr(torch, dtype), documents if packed else None)
    errors = [relative_error(result, x) for result, x in zip((out, *gradients), expected, strict=True)]
    assert max(errors) < BOUNDS[dtype], errors


@pytest.mark.parametrize("mask", ["none", "causal", "documents"])
def test_plain_operations_equal_the_kernel(mask: str) -> None:
    """Those for fp64 on a GPU, also where a query attends to no key of the block."""
    *tensors, documents = make_inputs()
    q, k, v, grad_out = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in tensors)
    visible = (documents[:, None, :, None] == documents[:, None, None, :]).roll(1, -1)
    block_mask = BlockMask(mask != "none", visible if mask == "documents" else None)
    out, lse = attend(q, k, v, block_mask)
    plain_out, plain_lse = blockwise_attention._attend_densely(q, k, v, block_mask)
    has_keys = lse > -1e29
    assert torch.allclose(plain_lse[has_keys], lse[has_keys], rtol=1e-13)
    assert torch.allclose(plain_out[has_keys], out[has_keys], rtol=1e-12, atol=1e-14)
    assert (plain_lse[~has_keys] < -1e29).all() and bool(has_keys.all()) is (mask != "documents")
    other_out, other_lse = torch.zeros_like(out), torch.zeros_like(lse)  # of other keys, which all queries attend to
    merged, merged_lse = merge_blocks(out, lse, other_out, other_lse)
    expected = attend_backward(grad_out, q, k, v, merged, merged_lse, block_mask)
    results = blockwise_attention._attend_densely_backward(grad_out, q, k, v, merged, merged_lse, block_mask)
    for result, gradient in zip(results, expected, strict=True):
        assert torch.allclose(result, gradient, rtol=1e-12, atol=1e-14)


def run_context_parallel(
    rank: int, rendezvous: Any, layout: Layout, device: str, dtype: str, packed: bool
) -> list[Tensor]:
    """Return the local output and gradients of a rank."""
    context = init_process_groups(rendezvous, rank, layout, torch.device("cpu"))
    *tensors, documents = make_inputs()
    ring, ulysses = layout.cp // layout.ulysses, layout.ulysses
    positions = get_rank_positions(LENGTH, ring, ulysses, rank // ulysses, rank % ulysses)
    q, k, v, grad_out = (x[:, :, positions].to(device, getattr(torch, dtype)) for x in tensors)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention = ContextParallelAttention(HEADS, KV_HEADS, LENGTH, context.axes)
    with stage_collectives():
        out = attention(*inputs, documents.to(device) if packed else None)
        out.backward(grad_out)
    return [x.detach().double().cpu() for x in (out, *(x.grad for x in inputs if x.grad is not None))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_context_parallel_attention_equals_dense_attention(
    pool: WarmPool, device: str, ulysses: int, dtype: str, packed: bool
) -> None:
    layout = Layout(cp=2, ulysses=ulysses)
    results = pool.call(run_context_parallel, 2, layout, device, dtype, packed)
    expected = run_dense_attention(getattr(torch, dtype), make_inputs()[-1] if packed else None)
    for rank, parts in enumerate(results):
        ring = layout.cp // ulysses
        positions = get_rank_positions(LENGTH, ring, ulysses, rank // ulysses, rank % ulysses)
        errors = [relative_error(part, full[:, :, positions]) for part, full in zip(parts, expected, strict=True)]
        assert max(errors) < BOUNDS[dtype], errors


def record_order(trainer: Any) -> list[str]:
    """Train one microbatch of a model with one layer; return in which order transfers and blocks of attention ran."""
    order: list[str] = []

    def record(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(name.removeprefix("_").removesuffix("_rotation"))
            return real(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    patches = [(Ring, "start_rotation"), (Rotation, "wait")]
    patches += [(ring_attention, name) for name in ("_attend", "_attend_backward")]
    with ExitStack() as stack:
        for owner, name in patches:
            stack.enter_context(record(owner, name))
        trainer.train_step(0)
    return order


def test_tensors_travel_while_blocks_are_attended_to(pool: WarmPool) -> None:
    words = ["cluster.workers=3", "parallel.cp=3", "model.num_layers=1", "train.micro_batch_size=12"]
    forward = ["start", "attend", "wait", "start", "attend", "wait", "attend"]
    backward = ["start", "attend_backward", "start"]  # keys and values; their gradients
    backward += ["wait", "start", "attend_backward", "wait", "start"]
    backward += ["wait", "attend_backward", "wait", "start", "wait"]
    for order in pool.inspect_trainers(record_order, make_small_config(None, *words)):
        assert order == forward + backward
