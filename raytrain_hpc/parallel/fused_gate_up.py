"""One product for the gate and the up projection of SwiGLU, from their concatenated weights.

The weights stay two parameters. Compiled code that casts them to bf16 writes the casts next to each other, so that the
concatenation costs nothing; the wider product, and one gradient of its input instead of two, gain.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.schema import Config
from raytrain_hpc.model.autocast import cast_for_autocast
from raytrain_hpc.model.decoder import Decoder, SwiGLU
from raytrain_hpc.planner.layout import Layout
from raytrain_hpc.torch_private import has_forward_hooks


def should_fuse_gate_up(config: Config, layout: Layout) -> bool:
    """Return whether to compute gate and up projection as one product: in compiled bf16, whose weights are cast.

    Not if weight gradients are deferred, which each layer does by itself, and not under elastic determinism, where a
    schedule that defers them gives the bits of one that does not.
    """
    defers_wgrad = layout.pp > 1 and layout.pipeline.splits_backward
    is_elastic = config.train.deterministic == "elastic"
    return config.train.compile is True and config.train.dtype == "bf16" and not defers_wgrad and not is_elastic


def fuse_gate_up(decoder: Decoder) -> None:
    """Compute gate and up projection of each feed-forward network as one product, in place.

    Leaves out those whose projections are not plain linear layers, as tiles and LoRA make them.
    """
    for module in decoder.modules():
        if isinstance(module, SwiGLU) and _is_plain(module.gate) and _is_plain(module.up):
            module.project = partial(_project, module.gate, module.up)  # type: ignore[method-assign]


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear and "forward" not in vars(layer) and not has_forward_hooks(layer)


def _project(gate: nn.Linear, up: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.cat([cast_for_autocast(layer.weight) for layer in (gate, up)])
    has_bias = gate.bias is not None and up.bias is not None
    projected = F.linear(x, weight, torch.cat([gate.bias, up.bias]) if has_bias else None)
    first, second = torch.split(projected, [gate.out_features, up.out_features], dim=-1)
    return first, second
