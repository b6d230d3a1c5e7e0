"""Linear layers whose matrix products run in float8, with one dynamic scale per tensor (train.dtype=float8).

Inputs and weights are e4m3, gradients e5m2 (Micikevicius et al. 2022, arXiv 2209.05433). Each tensor is scaled by the
largest power of two that keeps its largest magnitude representable. Scaling by a power of two is exact, so a scale
decides only which small values become subnormal or zero. A shard that is scaled by its own largest magnitude therefore
has the same rounded values as in the whole tensor, except for those tiny ones: scales are local, and need no
communication under tensor and context parallelism.

All products are `a @ b.T` of operands whose rows are contiguous, the only order that GPUs multiply in float8. Operands
of the other orders are transposed copies, of one byte per element.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.model.cross_entropy import LogitProducts
from raytrain_hpc.model.decoder import Decoder, Head, compute_logits
from raytrain_hpc.model.lora import TARGET_MODULES
from raytrain_hpc.parallel.tensor_parallel import ReplicatedKVLinear, RowParallelLinear
from raytrain_hpc.parallel.tiled_linear import TiledLinear
from raytrain_hpc.torch_device import is_on_accelerator
from raytrain_hpc.torch_private import scaled_mm, unsafe_view

SIZE_MULTIPLE = 16  # that GPUs need of the sizes of a float8 product

_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_WIDE = torch.bfloat16  # dtype in which tensors are rounded first, as without float8, and of the results
_MIN_AMAX = 2.0**-60  # keeps the scale of a tensor of zeros, and the product of two scales, finite
_EXPONENT_BITS = 0x7F800000  # of a positive fp32 number

_MARK = "computes_in_float8"  # attribute of modules

_LAYER = re.compile(r"(?<=layers\.)\d+")

_log = logging.getLogger(__name__)


class Float8Tensor(NamedTuple):
    """A quantized tensor: `data`, contiguous in a float8 dtype, times `factor` (fp32, no dimensions)."""

    data: Tensor
    factor: Tensor


def compute_scales(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the scales and the factors that undo them, both fp32, of tensors with the largest magnitudes `amax`.

    A scale is the largest power of two whose product with the magnitude is representable in `dtype`. The factor is NaN
    if the magnitude is not finite. This is not left to the cast: some turn infinity into the largest float8 number.
    """
    ratio = torch.finfo(dtype).max / amax.float().clamp(min=_MIN_AMAX)
    scale = (ratio.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return scale, torch.where(amax.isfinite(), scale.reciprocal(), torch.nan)


def quantize(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Float8Tensor:
    """Round x to bf16, and that to a float8 dtype with a scale of its own.

    `amax`: its largest magnitude, if that is known. If a number is not finite, all are NaN.
    """
    scale, factor = compute_scales(find_amax(x) if amax is None else amax, dtype)
    return Float8Tensor(cast_scaled(x, scale, dtype).contiguous(), factor)


def cast_scaled(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x, rounded to bf16, times `scale` in a float8 dtype. Nothing has to be clamped, see `compute_scales`.

    Scaled before it is rounded to bf16, which gives the same numbers.
    """
    return (x * scale).to(_WIDE).to(dtype)


def find_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of x rounded to bf16, in fp32 and without dimensions.

    The compiler leaves out roundings between operations, but not where it stores a result. Were the magnitude in bf16,
    what it computes before it stores it and what it computes from the stored number could get different scales.
    """
    return x.to(_WIDE).float().abs().amax()


def multiply(a: Float8Tensor, b: Float8Tensor, *, fast_accumulation: bool = False) -> Tensor:
    """Compute `a @ b.T` in bf16: [m, n] of a [m, k] and b [n, k], both contiguous. n and k: multiples of SIZE_MULTIPLE.

    On CPU, where sizes are arbitrary, the exact product of the rounded values is rounded once, for tests: it is slow.
    `fast_accumulation`: sum with less than fp32 precision where the GPU can.
    """
    if _has_kernel(a.data):
        product: Tensor = scaled_mm(
            a.data, b.data.t(), a.factor, b.factor, out_dtype=_WIDE, use_fast_accum=fast_accumulation
        )
        return product
    # In fp64, which autocast does not change, and in which sums of so narrow values are nearly always exact.
    return ((a.data.double() @ b.data.double().t()) * (a.factor.double() * b.factor.double())).to(_WIDE)


def _has_kernel(x: Tensor) -> bool:
    """Return whether the device of x multiplies in float8. CPUs have the operation too, but round in their own way."""
    return is_on_accelerator(x)


def transpose(x: Float8Tensor, *, multiple: int = 1) -> Float8Tensor:
    """Return the contiguous transpose of x [m, k], with zeros up to the next multiple of columns: [k, m or more]."""
    data, padding = x.data, -x.data.shape[0] % multiple
    if padding:  # as bytes: not all operations know float8
        data = F.pad(data.view(torch.uint8), (0, 0, 0, padding)).view(data.dtype)
    return Float8Tensor(data.t().contiguous(), x.factor)


def compute_output(x: Float8Tensor, weight: Tensor) -> Tensor:
    """Compute the product [m, o] of quantized inputs [m, i] and a weight [o, i] of any dtype."""
    return multiply(x, quantize(weight, _VALUES), fast_accumulation=True)


def compute_input_grad(grad_out: Float8Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient [m, i] of the input from that of the output [m, o], quantized, and the weight [o, i].

    The weight is quantized again: its float8 copy would keep memory that ZeRO-3 frees after the forward pass.
    """
    amax = find_amax(weight)
    if torch.compiler.is_compiling():
        # Depend on the gradient: the compiler would move what does not into the forward pass, and keep the copy.
        amax, _ = torch.stack((amax.float(), grad_out.factor)).unbind()
    return multiply(grad_out, transpose(quantize(weight, _VALUES, amax)))


def compute_weight_grad(grad_out: Float8Tensor, x: Float8Tensor) -> Tensor:
    """Compute the gradient [o, i] of the weight from that of the output [m, o] and the input [m, i], both quantized."""
    return multiply(transpose(grad_out, multiple=SIZE_MULTIPLE), transpose(x, multiple=SIZE_MULTIPLE))


def quantize_input(x: Tensor) -> Float8Tensor:
    """Quantize the input [..., i] of a linear layer as a matrix [m, i]."""
    return quantize(x.flatten(0, -2), _VALUES)


def quantize_grad(grad_out: Tensor) -> Float8Tensor:
    """Quantize the gradient [..., o] of the output of a linear layer as a matrix [m, o]."""
    return quantize(grad_out.flatten(0, -2), _GRADIENTS)


def restore_shape(rows: Tensor, x: Tensor) -> Tensor:
    """Return the matrix rows [m, n], which nothing else may use, in the shape [..., n] of x [..., any]."""
    return rows if x.dim() == 2 else unsafe_view(rows, [*x.shape[:-1], rows.shape[1]])  # type: ignore[no-any-return]


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear` in float8, as are the products of its backward pass: [..., o] in bf16.

    x: [..., i]; weight: [o, i]; bias: [o]. For the backward pass it keeps the quantized input, one byte per element.
    """
    product: Tensor = _Float8Linear.apply(x, weight)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias.to(product.dtype)


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        quantized = quantize_input(x)
        ctx.dtypes = x.dtype, weight.dtype
        # The weight of a frozen layer needs no gradient, so its input is not kept.
        ctx.save_for_backward(weight, *(quantized if ctx.needs_input_grad[1] else ()))
        return restore_shape(compute_output(quantized, weight), x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, *quantized = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        grad_out = quantize_grad(gradients[0])
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = restore_shape(compute_input_grad(grad_out, weight), gradients[0]).to(input_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = compute_weight_grad(grad_out, Float8Tensor(*quantized)).to(weight_dtype)
        return grad_x, grad_weight


class _Float8LogitProducts(LogitProducts):
    """The products of an output head, in float8. Each chunk of positions has scales of its own.

    The weight is quantized once for all chunks. `is_compiled`: compile what quantizes and transposes.
    """

    def __init__(self, *, is_compiled: bool) -> None:
        self._quantize: Callable[..., tuple[Float8Tensor, Float8Tensor | None]] = quantize_both_ways
        if is_compiled:
            self._quantize = torch.compile(quantize_both_ways)

    def prepare_weight(self, weight: Tensor, needs: tuple[bool, bool]) -> Any:
        return self._quantize(weight, _VALUES, 1 if needs[0] else 0)

    def compute_logits(self, x: Tensor, weight: Any, needs: tuple[bool, bool]) -> tuple[Tensor, Any]:
        rows, columns = self._quantize(x, _VALUES, SIZE_MULTIPLE if needs[1] else 0)
        return multiply(rows, weight[0], fast_accumulation=True), columns

    def compute_grads(
        self, grad_logits: Tensor, saved: Any, weight: Any, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, columns = self._quantize(grad_logits, _GRADIENTS, SIZE_MULTIPLE if needs[1] else 0)
        grad_x = multiply(rows, weight[1]) if needs[0] else None
        return grad_x, None if columns is None else multiply(columns, saved)


def quantize_both_ways(x: Tensor, dtype: torch.dtype, multiple: int) -> tuple[Float8Tensor, Float8Tensor | None]:
    """Return a matrix x, quantized, and its transpose with columns up to a multiple of `multiple`; 0: None instead."""
    quantized = quantize(x, dtype)
    return quantized, transpose(quantized, multiple=multiple) if multiple else None


def apply_float8(decoder: Decoder, *, include_head: bool, defers_wgrad: bool, is_compiled: bool = False) -> None:
    """Compute the linear layers qkv, out, gate, up and down of a decoder in float8, in place, and mark them.

    Layers with a size that SIZE_MULTIPLE does not divide stay in bf16; one warning names them. `include_head`:
    also the output head. `defers_wgrad`: the pipeline schedule splits backward passes, so the head is not padded.
    `is_compiled`: also compile what the head does for each chunk of positions. Call when shards, adapters and tiles are
    in place, before weight gradients are deferred.
    """
    refused: dict[str, None] = {}  # without duplicates, in order
    for name, layer, num_rows, num_columns in _iter_layers(decoder, include_head=include_head):
        is_padded = isinstance(layer, Head) and not defers_wgrad
        if num_columns % SIZE_MULTIPLE or (num_rows % SIZE_MULTIPLE and not is_padded):
            refused[f"{_LAYER.sub('*', name)} [{num_rows}, {num_columns}]"] = None
            continue
        setattr(layer, _MARK, True)
        if isinstance(layer, nn.Linear):
            # A method: torch.compile compiles a block again for each `functools.partial`.
            layer.forward = MethodType(_linear_forward, layer)  # type: ignore[method-assign]
        else:
            layer.product = partial(compute_logits, product=float8_linear) if is_padded else float8_linear  # type: ignore[assignment]
        if isinstance(layer, Head) and layer.chunked_loss is not None:
            layer.chunked_loss = replace(layer.chunked_loss, products=_Float8LogitProducts(is_compiled=is_compiled))
    if refused:
        _log.warning(
            "train.dtype=float8: in bf16, since %d does not divide their sizes: %s", SIZE_MULTIPLE, ", ".join(refused)
        )


def is_float8(module: nn.Module) -> bool:
    """Return whether `apply_float8` has put the product of a module into float8."""
    return hasattr(module, _MARK)


def _iter_layers(decoder: Decoder, *, include_head: bool) -> Iterator[tuple[str, nn.Module, int, int]]:
    """Yield name, module and size [rows, columns] of each product that can be in float8."""
    for name, module in decoder.named_modules():
        is_head = isinstance(module, Head)
        if not (include_head if is_head else name.rpartition(".")[2] in TARGET_MODULES):
            continue
        tiles = module if isinstance(module, TiledLinear) else getattr(module, "tiles", None)
        if isinstance(module, ReplicatedKVLinear):
            yield f"{name}.q", module.q, *module.q.weight.shape
            yield f"{name}.kv", module, module.num_kv_rows, module.kv.in_features
        elif isinstance(tiles, TiledLinear):
            for number, tile in enumerate(tiles):
                yield f"{name}.{number}", tile, *tile.get_parameter("weight").shape
        elif is_head and module.weight is None and decoder.embedding is not None:
            yield name, module, *decoder.embedding.weight.shape
        elif isinstance(module, nn.Linear | RowParallelLinear | Head):
            yield name, module, *module.get_parameter("weight").shape


def _linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return float8_linear(x, layer.weight, layer.bias)
