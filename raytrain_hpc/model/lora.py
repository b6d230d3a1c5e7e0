"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) on a decoder's linear layers, by `peft`.

What is trained of a layer y = W x is y = W x + (alpha / rank) B A x, with W left as it is. W keeps its canonical name;
A and B are named "LAYER.lora_A.default.weight" and "LAYER.lora_B.default.weight".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.state.shard_spec import ShardSpec

TARGET_MODULES = ("qkv", "out", "gate", "up", "down")
LORA_MARKER = ".lora_"  # in the names of what is trained
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class LoraSpec:
    """`targets`: which linear layers of a block, of TARGETS."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


def apply_lora(decoder: Decoder, lora: LoraSpec) -> dict[str, ShardSpec]:
    """Put adapters, without values, beside the linear layers of a decoder on the meta device, and freeze all else.

    Returns the cuts of the weights that they are beside, which have their old canonical names. Raises ModelError where
    no layer is one of the targets.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in decoder.named_modules() if _is_target(name, module, lora.target_modules)]
    if not names:
        raise ModelError(f"train.lora_targets={list(lora.target_modules)}: this decoder has no such layer")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names)  # type: ignore[arg-type]
    with torch.device("meta"):
        inject_adapter_in_model(config, decoder)
    named = dict(decoder.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(LORA_MARKER in name)
    return {
        name: ShardSpec.from_shape(name.replace(_BASE_LAYER, "."), one.shape)
        for name, one in named.items()
        if _BASE_LAYER in name
    }


def _is_target(name: str, module: nn.Module, target_modules: Collection[str]) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] in target_modules
