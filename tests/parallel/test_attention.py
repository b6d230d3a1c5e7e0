"""Attention over blocks of keys and over ranks, against dense attention in fp64: here on a CPU, and on a GPU too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from raytrain_hpc.distributed.process_groups import init_process_groups
from raytrain_hpc.model.decoder import causal_attention
from raytrain_hpc.parallel.blockwise_attention import BlockMask, attend, attend_backward, merge_blocks
from raytrain_hpc.parallel.context_parallel import ContextParallelAttention, get_rank_positions
from raytrain_hpc.planner.layout import Layout
from tests.parallel.host_staged_collectives import stage_collectives
from tests.warm_pool import WarmPool

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
BOUNDS = {"float32": 2e-6, "bfloat16": 1.5e-2}  # of the norm; one rounding of bf16 is 4e-3 at most
BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 6, 2, 94, 64


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, a gradient of what they give, all fp64, and documents."""
    generator = torch.Generator().manual_seed(7)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    numbers = [torch.randn(BATCH, one, LENGTH, WIDTH, generator=generator, dtype=torch.float64) for one in heads]
    ends = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    return numbers[0], numbers[1], numbers[2], numbers[3], ends.cumsum(1)


def dense(dtype: torch.dtype, documents: Tensor | None) -> list[Tensor]:
    """What it gives and the gradients of its inputs, of inputs rounded to this type."""
    *numbers, _ = drawn()
    q, k, v, slope = (one.to(dtype).double() for one in numbers)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    out = causal_attention(*inputs, documents)
    out.backward(slope)
    return [out.detach(), *(one.grad for one in inputs if one.grad is not None)]


def off(found: Tensor, wanted: Tensor) -> float:
    """Relative error, by the norm."""
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_keys_put_together_are_dense_attention(device: str, dtype: str, packed: bool) -> None:
    """Late queries see the early keys whole and the late ones causally, each in a call of its own, as in a ring."""
    *numbers, documents = drawn()
    q, k, v, slope = (one.to(device, getattr(torch, dtype)) for one in numbers)
    half = LENGTH // 2
    early, late = slice(0, half), slice(half, None)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).to(device) if packed else None

    def sight(queries: slice, keys: slice) -> BlockMask:
        return BlockMask(queries == keys, None if seen is None else seen[:, :, queries, keys])

    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    out[:, :, early], lse[:, :, early] = attend(*(x[:, :, early] for x in (q, k, v)), sight(early, early))
    own = attend(*(x[:, :, late] for x in (q, k, v)), sight(late, late))
    before = attend(q[:, :, late], k[:, :, early], v[:, :, early], sight(late, early))
    both, lse[:, :, late] = merge_blocks(own[0].float(), own[1], before[0].float(), before[1])
    out[:, :, late] = both.to(q.dtype)
    gradients = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for queries, keys in ((early, early), (late, late), (late, early)):
        whole = [x[:, :, queries] for x in (slope, q)], [x[:, :, keys] for x in (k, v)]
        parts = attend_backward(*whole[0], *whole[1], out[:, :, queries], lse[:, :, queries], sight(queries, keys))
        for gradient, part, where in zip(gradients, parts, (queries, keys, keys), strict=True):
            gradient[:, :, where] += part
    wanted = dense(getattr(torch, dtype), documents if packed else None)
    errors = [off(found, one) for found, one in zip((out, *gradients), wanted, strict=True)]
    assert max(errors) < BOUNDS[dtype], errors


def over_ranks(rank: int, meeting: Any, layout: Layout, device: str, dtype: str, packed: bool) -> list[Tensor]:
    """What this rank has of the output and the gradients."""
    place = init_process_groups(meeting, rank, layout, torch.device("cpu"))
    *numbers, documents = drawn()
    ring, ulysses = layout.cp // layout.ulysses, layout.ulysses
    mine = get_rank_positions(LENGTH, ring, ulysses, rank // ulysses, rank % ulysses)
    q, k, v, slope = (one[:, :, mine].to(device, getattr(torch, dtype)) for one in numbers)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    attention = ContextParallelAttention(HEADS, KV_HEADS, LENGTH, place.axes)
    with stage_collectives():
        out = attention(*inputs, documents.to(device) if packed else None)
        out.backward(slope)
    return [one.detach().float().cpu() for one in (out, *(one.grad for one in inputs if one.grad is not None))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_two_ranks_together_are_dense_attention(
    pool: WarmPool, device: str, ulysses: int, dtype: str, packed: bool
) -> None:
    layout = Layout(cp=2, ulysses=ulysses)
    found = pool.call(over_ranks, 2, layout, device, dtype, packed)
    wanted = dense(getattr(torch, dtype), drawn()[-1] if packed else None)
    for rank, parts in enumerate(found):
        ring = layout.cp // ulysses
        mine = get_rank_positions(LENGTH, ring, ulysses, rank // ulysses, rank % ulysses)
        errors = [off(part, whole[:, :, mine]) for part, whole in zip(parts, wanted, strict=True)]
        assert max(errors) < BOUNDS[dtype], errors
