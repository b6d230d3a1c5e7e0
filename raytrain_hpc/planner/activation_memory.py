"""Bytes of a layer's activations that a rank keeps from the forward pass for the backward pass."""

from __future__ import annotations

from typing import Literal

from raytrain_hpc.config.model_spec import ModelSpec

Recompute = Literal["none", "selective", "full"]


def compute_layer_bytes_per_token(
    shape: ModelSpec, *, tp: int, dtype: str, recompute: Recompute, compiled: bool = False
) -> float:
    """Bytes a token of a microbatch that one layer keeps, on a rank of `tp`; a token counts on one rank of cp.

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
    h, a, kv = shape.hidden_size, shape.attention_size, shape.kv_size
    if recompute == "full":
        return wide * h / tp
    feed_forward = _compute_feed_forward_bytes(shape, tp, wide, narrow, recompute == "selective", compiled)
    if recompute == "selective":
        products = a + 2 * kv + a  # queries, keys, values; attention
        return (wide * h + narrow * products) / tp + narrow * h + feed_forward  # row products before their sum
    fused = dtype == "bf16" or compiled
    norms = wide * h * (4 if shape.norm == "rmsnorm" and not fused else 2) / tp + narrow * h * 2
    attention = a + 2 * kv + a + (a + kv if shape.positions == "rotary" and not compiled else 0)
    attention += (a + kv) * ((shape.norm == "rmsnorm" and not fused) + (not compiled)) if shape.qk_norm else 0
    masks = 2 * h if shape.dropout else 0
    return norms + (narrow * attention + masks) / tp + feed_forward


def _compute_feed_forward_bytes(
    shape: ModelSpec, tp: int, residual_itemsize: int, matmul_itemsize: int, selective: bool, compiled: bool
) -> float:
    """What the feed-forward keeps between its first product's input and its last one's result.

    Every position goes to several experts, and to the shared one: the rows that go there are kept, what comes of them
    before it is weighed, and the router's scores.
    """
    ups = shape.num_ffn_matrices - 1
    swiglu = (3 if compiled else 4) if shape.activation == "swiglu" else 2
    a_channel = matmul_itemsize * (ups if selective else swiglu)
    k, h = shape.experts_per_token, shape.hidden_size
    result = matmul_itemsize * h if selective and not compiled else 0
    if not shape.num_experts:
        return a_channel * shape.ffn_size / tp + result
    shared = a_channel * shape.shared_expert_size / tp + (result if shape.shared_expert_size else 0)
    routed = a_channel * k * shape.ffn_size / tp + matmul_itemsize * k * h * (1 if selective else 2)
    # Scores in fp32 at least; and of each choice its place there and back, and its weight.
    return shared + routed + residual_itemsize * shape.num_experts + k * (3 * 8 + 3 * residual_itemsize)
