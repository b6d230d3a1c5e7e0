"""Attention of some queries to some keys with its log-sum-exp, so that blocks can be put together exactly.

The outputs of two blocks of keys combine by their log-sum-exps (Dao et al. 2022, arXiv 2205.14135); given the combined
output and log-sum-exp, the backward pass of each block stands alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten
_MASKED_SCORE = -1e30


@dataclass(frozen=True)
class BlockMask:
    """Which queries see which keys. `causal` takes as many of both and lets position i see positions 0..i.

    `seen` bool [b, 1, t, s], None: all; a query may see none, and then adds nothing to what is combined.
    """

    causal: bool
    visible: Tensor | None = None

    def make_bias(self, q: Tensor) -> Tensor | None:
        """What is added to the scores. A number that vanishes beside any score: infinity would give NaN."""
        if self.visible is None:
            return None
        visible = self.visible.tril() if self.causal else self.visible
        # The GPU kernel wants rows that start at multiples of 16 bytes.
        rows = q.new_zeros((*visible.shape[:-1], -(-visible.shape[-1] // 16) * 16))[..., : visible.shape[-1]]
        return rows.masked_fill_(~visible, _MASKED_SCORE).expand(-1, q.shape[1], -1, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Output [b, heads, t, d] and log-sum-exp [b, heads, t] of q [b, heads, t, d] over k, v [b, kv_heads, s, d]."""
    k, v = _repeat_kv(k, q.shape[1]), _repeat_kv(v, q.shape[1])
    bias = mask.make_bias(q)
    causal = mask.causal and bias is None
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias)
        return out, lse
    if bias is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        return out, lse
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def attend_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockMask
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from that of the output. `out` and `lse` are those over all keys, not this block's."""
    heads, kv_heads = q.shape[1], k.shape[1]
    wide_k, wide_v = _repeat_kv(k, heads), _repeat_kv(v, heads)
    bias = mask.make_bias(q)
    causal = mask.causal and bias is None
    if q.device.type == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, q, wide_k, wide_v, out, lse, 0.0, causal, attn_mask=bias
        )
    elif bias is None and q.dtype in (torch.float16, torch.bfloat16):
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad_out,
            q,
            wide_k,
            wide_v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            nothing,
            nothing,
        )
    else:
        nothing = torch.empty(0, dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_out,
            q,
            wide_k,
            wide_v,
            bias,
            out,
            _align_rows(lse),
            nothing,
            nothing,
            0.0,
            [True, True, True, False],
            causal,
        )
    return dq, _sum_over_groups(dk, kv_heads), _sum_over_groups(dv, kv_heads)


def _align_rows(lse: Tensor) -> Tensor:
    """The same numbers in rows that start where the GPU kernel wants them; behind a row's end are queries that see
    nothing, as its forward pass leaves them."""
    rows = lse.new_full((*lse.shape[:-1], -(-lse.shape[-1] // 32) * 32), torch.inf)
    rows[..., : lse.shape[-1]] = lse
    return rows


def merge_blocks(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of two blocks. Weights that are zero leave no NaN."""
    both = torch.logaddexp(lse, other_lse)
    mine, other = (lse - both).exp().unsqueeze(-1), (other_lse - both).exp().unsqueeze(-1)
    return out * mine + other_out * other, both


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """A key-value head for every query head."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _sum_over_groups(x: Tensor, num_kv_heads: int) -> Tensor:
    """The gradient of a key-value head from those of the query heads that share it."""
    return x if x.shape[1] == num_kv_heads else x.reshape(x.shape[0], num_kv_heads, -1, *x.shape[2:]).sum(dim=2)
