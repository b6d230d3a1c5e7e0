"""Activation memory: bytes per layer that a rank keeps from the forward pass for the backward pass."""

from __future__ import annotations

from typing import Literal

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.training_config import computes_in_bf16

Recompute = Literal["none", "selective", "full"]


def compute_layer_bytes_per_token(
    spec: ModelSpec,
    *,
    tp: int,
    dtype: str,
    recompute: Recompute,
    compiled: bool = False,
    residual_itemsize: int | None = None,
) -> float:
    """Return the bytes that one layer keeps per token of a microbatch, on one of `tp` ranks.

    After Korthikanti et al. 2022 (arXiv 2205.05198), adapted to these layers: fused attention keeps no scores, inputs
    of column-parallel products are kept gathered, and everything else is sharded over tp. By `recompute`, kept are

    - none: inputs and outputs of both norms (for RMSNorm also its scaled input), queries, keys, values (again after
      rotary embedding), the attention output, and up projection, activation and their product in the feed-forward; one
      byte per element for each of two dropout masks;
    - selective: the layer's input and the outputs of matrix products and attention;
    - full: the layer's input.

    Elements have 4 bytes in fp32 and 8 in fp64. In bf16, outputs of products have 2 bytes and the residual stream has
    `residual_itemsize`, by default 4. Norms are taken to be fused in bf16, as they are on a GPU: they keep only their
    input, and the next product keeps the cast output. Compiled blocks keep less. Their norms are fused in all dtypes,
    and they recompute the output of the activation, that of the last product, and the input of the second norm, for
    which they keep the output of the attention's product.

    Float8 is bf16, except that the inputs of its products are kept quantized, in one byte: the norms' outputs, again
    for each up projection; the attention output, which attention keeps too; and the last product's. Compiled blocks
    keep none of them but the attention output, and compute and quantize the others again.
    """
    residual_itemsize = residual_itemsize or _get_residual_itemsize(dtype)
    matmul_itemsize = 2 if computes_in_bf16(dtype) else residual_itemsize
    is_float8 = dtype == "float8"
    h, a, kv = spec.hidden_size, spec.attention_size, spec.kv_size
    if recompute == "full":
        return residual_itemsize * h / tp
    feed_forward = _compute_feed_forward_bytes(
        spec, tp, residual_itemsize, matmul_itemsize, recompute == "selective", compiled
    )
    if is_float8 and recompute == "none":
        ffn_size = spec.shared_expert_size if spec.num_experts else spec.ffn_size
        feed_forward -= ffn_size / tp * (matmul_itemsize if compiled else 1)
    if recompute == "selective":
        outputs = a + 2 * kv + a  # queries, keys, values; attention
        # The second term: outputs of row-parallel products before their sum.
        return (residual_itemsize * h + matmul_itemsize * outputs) / tp + matmul_itemsize * h + feed_forward
    fused = computes_in_bf16(dtype) or compiled
    norms = residual_itemsize * h * (4 if spec.norm == "rmsnorm" and not fused else 2) / tp
    if compiled:
        norms = (residual_itemsize + matmul_itemsize) * h / tp
    norms += _compute_float8_input_bytes(spec, tp, compiled) if is_float8 else matmul_itemsize * h * 2
    # After rotary embedding, values are a part of the product's output, which stays in memory as a whole.
    attention = a + 2 * kv + a + (a + kv if spec.position_embedding == "rotary" else 0)
    attention += (a + kv) * ((spec.norm == "rmsnorm" and not fused) + (not compiled)) if spec.qk_norm else 0
    masks = 2 * h if spec.dropout else 0
    return norms + (matmul_itemsize * attention + masks) / tp + feed_forward


def compute_offloaded_bytes(
    layer_bytes: float, input_bytes: float, *, recompute: Recompute, compiled: bool = False
) -> float:
    """Return the part of what a layer keeps that `parallel.activation_offload` moves to the host.

    `layer_bytes`: all that it keeps; `input_bytes`: its input in the residual stream. That is all of it, but for
    products that selective recomputation keeps outside of autograd: those of blocks that are not compiled stay on the
    device.
    """
    return input_bytes if recompute == "selective" and not compiled else layer_bytes


def compute_deferred_bytes_per_token(spec: ModelSpec, *, tp: int, dtype: str) -> float:
    """Return the bytes that a layer holds per token between the two parts of a split backward pass.

    They are the inputs and the gradients of the outputs of its linear layers.
    """
    itemsize = 2 if computes_in_bf16(dtype) else _get_residual_itemsize(dtype)
    h, k, num_up = spec.hidden_size, spec.experts_per_token, spec.num_ffn_matrices - 1
    attention = h + (2 * spec.attention_size + 2 * spec.kv_size) / tp + h
    if not spec.num_experts:
        return itemsize * (attention + 2 * h + (num_up + 1) * spec.ffn_size / tp)
    shared = 2 * h + (num_up + 1) * spec.shared_expert_size / tp if spec.shared_expert_size else 0
    return itemsize * (attention + shared + k * (2 * h + (num_up + 1) * spec.ffn_size / tp))


def _get_residual_itemsize(dtype: str) -> int:
    return 8 if dtype == "fp64" else 4


def _compute_float8_input_bytes(spec: ModelSpec, tp: int, compiled: bool) -> float:
    """Return the bytes kept of the inputs of all products but the last, per token. Those of experts stay in bf16."""
    num_up, h = spec.num_ffn_matrices - 1, spec.hidden_size
    inputs = h + spec.attention_size / tp
    if compiled:
        return 2 * h if spec.num_experts else 0
    if not spec.num_experts:
        return inputs + num_up * h
    return inputs + 2 * h + (num_up * h if spec.shared_expert_size else 0)


def _compute_feed_forward_bytes(
    spec: ModelSpec, tp: int, residual_itemsize: int, matmul_itemsize: int, selective: bool, compiled: bool
) -> float:
    """Return the bytes kept per token between the input of the first product and the output of the last one.

    With experts, a token is kept once for each expert it is routed to, before and after the expert, besides the shared
    expert and the router's scores.
    """
    num_up = spec.num_ffn_matrices - 1
    activation_tensors = (3 if compiled else 4) if spec.activation == "swiglu" else 2
    bytes_per_channel = matmul_itemsize * (num_up if selective else activation_tensors)
    k, h = spec.experts_per_token, spec.hidden_size
    output = matmul_itemsize * h if selective and not compiled else 0
    if not spec.num_experts:
        return bytes_per_channel * spec.ffn_size / tp + output
    shared = bytes_per_channel * spec.shared_expert_size / tp + (output if spec.shared_expert_size else 0)
    routed = bytes_per_channel * k * spec.ffn_size / tp + matmul_itemsize * k * h * (1 if selective else 2)
    # Scores in at least fp32; per routed expert three int64 indexes and three weights.
    return shared + routed + residual_itemsize * spec.num_experts + k * (3 * 8 + 3 * residual_itemsize)
