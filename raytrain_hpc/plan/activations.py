"""Bytes of a layer's activations that a rank keeps from the forward pass for the backward pass."""

from __future__ import annotations

from typing import Literal

from raytrain_hpc.shape import ModelShape

Recompute = Literal["none", "selective", "full"]


def layer_bytes_per_token(
    shape: ModelShape, *, tp: int, dtype: str, recompute: Recompute, compiled: bool = False
) -> float:
    """Bytes a token of a microbatch that one dense layer keeps, on a rank of `tp`; a token counts on one rank of cp.

    After Korthikanti et al. 2022 (arXiv 2205.05198), for the layers as they are here: fused attention keeps no scores;
    inputs of column products are kept gathered, everything else is shared out. Kept are

    - none: both norms' inputs and results (an RMS norm also its scaled input), queries, keys, values (again once they
      are turned by rotary positions), what attention gives, and of the feed-forward up, activation and their product;
      a byte an element for each of two dropout masks;
    - selective: the layer's input and the results of products and attention;
    - full: the layer's input.

    Elements have 4 bytes in fp32, 8 in fp64. In bf16 those of products have 2 and the residual stream's 4, and norms
    are taken to be fused, as they are on a GPU: they keep their input alone, which the product behind them has cast.
    Blocks that are compiled keep less: norms are fused in all types, and queries and keys before they are turned, what
    the activation gives and the last product's result come again from what else is kept.
    """
    wide = 8 if dtype == "fp64" else 4
    narrow = 2 if dtype == "bf16" else wide
    h, f, kv = shape.hidden_size, shape.ffn_size, shape.kv_size
    ups = shape.feed_forward_matrices - 1
    if recompute == "full":
        return wide * h / tp
    if recompute == "selective":
        products = h + 2 * kv + h + ups * f  # queries, keys, values; attention; up and gate
        # Row products before their sum over ranks.
        return (wide * h + narrow * products) / tp + narrow * h * (1 if compiled else 2)
    scaled = shape.norm == "rmsnorm" and dtype != "bf16" and not compiled
    norms = wide * h * (4 if scaled else 2) / tp + narrow * h * 2
    attention = h + 2 * kv + h + (h + kv if shape.positions == "rotary" and not compiled else 0)
    feed_forward = f * ((3 if compiled else 4) if shape.activation == "swiglu" else 2)
    masks = 2 * h if shape.dropout else 0
    return norms + (narrow * (attention + feed_forward) + masks) / tp
