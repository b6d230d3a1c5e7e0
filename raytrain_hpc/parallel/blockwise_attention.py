"""Blockwise attention: outputs with their log-sum-exp, so that blocks of keys can be merged exactly.

The log-sum-exps give the weights with which outputs of two blocks of keys are merged (Dao et al. 2022, arXiv
2205.14135). Given the merged output and log-sum-exp, the backward pass of each block is independent of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from raytrain_hpc.torch_private import (
    sdpa_cpu,
    sdpa_cpu_backward,
    sdpa_efficient,
    sdpa_efficient_backward,
    sdpa_flash,
    sdpa_flash_backward,
)

MASKED_SCORE = -1e30


@dataclass(frozen=True)
class BlockMask:
    """The attention mask of a block of t queries and s keys.

    `causal`: query i attends to keys 0..i of the block; needs t = s. `visible`: bool [b, 1, t, s], None: all. A query
    may attend to no key of the block; its output then gets weight 0 in `merge_blocks`.
    """

    causal: bool
    visible: Tensor | None = None

    def make_bias(self, q: Tensor) -> Tensor | None:
        """Return the bias to add to the attention scores, [b, heads, t, s]; None without `visible`.

        Masked scores get a large negative number: minus infinity would give NaN for a query that attends to no key.
        """
        if self.visible is None:
            return None
        visible = self.visible.tril() if self.causal else self.visible
        # The GPU kernel needs rows that start at multiples of 16 bytes.
        bias = q.new_zeros((*visible.shape[:-1], -(-visible.shape[-1] // 16) * 16))[..., : visible.shape[-1]]
        return bias.masked_fill_(~visible, MASKED_SCORE).expand(-1, q.shape[1], -1, -1)


def get_lse_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp of attention with queries q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Return the output [b, heads, t, d] and the log-sum-exp [b, heads, t] of attention over a block of keys.

    q: [b, heads, t, d]; k, v: [b, kv_heads, s, d].
    """
    k, v = _repeat_kv(k, q.shape[1]), _repeat_kv(v, q.shape[1])
    bias = mask.make_bias(q)
    causal = mask.causal and bias is None
    if q.device.type == "cpu":
        out, lse = sdpa_cpu(q, k, v, 0.0, causal, attn_mask=bias)
        return out, lse
    if q.dtype == torch.float64:
        return _attend_densely(q, k, v, mask)
    if bias is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = sdpa_flash(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = sdpa_efficient(q, k, v, bias, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for one block of keys.

    `grad_out`: gradient of the merged output. `out`, `lse`: merged over all blocks of keys, not those of this block.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    repeated_k, repeated_v = _repeat_kv(k, num_heads), _repeat_kv(v, num_heads)
    bias = mask.make_bias(q)
    causal = mask.causal and bias is None
    if q.device.type == "cpu":
        dq, dk, dv = sdpa_cpu_backward(grad_out, q, repeated_k, repeated_v, out, lse, 0.0, causal, attn_mask=bias)
    elif q.dtype == torch.float64:
        dq, dk, dv = _attend_densely_backward(grad_out, q, repeated_k, repeated_v, out, lse, mask)
    elif bias is None and q.dtype in (torch.float16, torch.bfloat16):
        empty = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv = sdpa_flash_backward(
            grad_out,
            q,
            repeated_k,
            repeated_v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            empty,
            empty,
        )
    else:
        empty = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = sdpa_efficient_backward(
            grad_out,
            q,
            repeated_k,
            repeated_v,
            bias,
            out,
            _align_rows(lse),
            empty,
            empty,
            0.0,
            [True, True, True, False],
            causal,
        )
    return dq, _sum_over_groups(dk, num_kv_heads), _sum_over_groups(dv, num_kv_heads)


def _compute_scores(q: Tensor, k: Tensor, mask: BlockMask) -> Tensor:
    """Return the scaled attention scores [b, heads, t, s]; masked ones are a large negative number."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device) if mask.visible is None else mask.visible
    return scores.masked_fill(~(visible.tril() if mask.causal else visible), MASKED_SCORE)


def _attend_densely(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Compute `attend` in plain operations: no GPU kernel supports fp64. k, v: [b, heads, s, d]."""
    scores = _compute_scores(q, k, mask)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ v, lse


def _attend_densely_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` in plain operations. k, v: [b, heads, s, d]."""
    weights = (_compute_scores(q, k, mask) - lse.unsqueeze(-1)).exp()
    grad_weights = grad_out @ v.mT
    grad_scores = weights * (grad_weights - (grad_out * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return grad_scores @ k, grad_scores.mT @ q, weights.mT @ grad_out


def _align_rows(lse: Tensor) -> Tensor:
    """Return `lse` as a view into rows padded to a multiple of 32, as the GPU kernel expects.

    The padding is infinity, as in the log-sum-exp that the forward kernel returns.
    """
    padded = lse.new_full((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32), torch.inf)
    padded[..., : lse.shape[-1]] = lse
    return padded


def merge_blocks(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over the keys of two blocks. Weights of zero give no NaN."""
    merged_lse = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - merged_lse).exp().unsqueeze(-1), (other_lse - merged_lse).exp().unsqueeze(-1)
    return out * weight + other_out * other_weight, merged_lse


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Repeat key-value heads so that each query head has one."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _sum_over_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """Sum the gradients of the query heads that share a key-value head: [b, num_kv_heads, ...]."""
    return x if x.shape[1] == num_kv_heads else x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:]).sum(dim=2)
