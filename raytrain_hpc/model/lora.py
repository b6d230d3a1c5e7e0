"""Low-rank adapters on the linear layers of a decoder (LoRA: Hu et al. 2021, arXiv 2106.09685), with `peft`.

A layer y = W x becomes y = W x + (alpha / rank) B A x, with W frozen. W keeps its canonical name; A and B are named
"LAYER.lora_A.default.weight" and "LAYER.lora_B.default.weight".
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
LORA_MARKER = ".lora_"  # in the names of trainable parameters
_BASE_LAYER = ".base_layer."


@dataclass(frozen=True)
class LoraSpec:
    """LoRA settings. `target_modules`: linear layers of a block to adapt, from TARGET_MODULES."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]


def apply_lora(decoder: Decoder, lora: LoraSpec | None) -> dict[str, ShardSpec]:
    """Add uninitialized adapters to the linear layers of a decoder on the meta device, and freeze all other parameters.

    `lora`: None does nothing. Returns the shard specs of the adapted weights, which keep their canonical names. Raises
    ModelError if the decoder has none of the target layers.
    """
    if lora is None:
        return {}
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in decoder.named_modules() if _is_target(name, module, lora.target_modules)]
    if not names:
        raise ModelError(f"lora.target_modules={list(lora.target_modules)}: the decoder has none of these layers")
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=names)  # type: ignore[arg-type]
    with torch.device("meta"):
        inject_adapter_in_model(config, decoder)
    parameters = dict(decoder.named_parameters())
    for name, parameter in parameters.items():
        parameter.requires_grad_(LORA_MARKER in name)
    return {
        name: ShardSpec.from_shape(name.replace(_BASE_LAYER, "."), parameter.shape)
        for name, parameter in parameters.items()
        if _BASE_LAYER in name
    }


def _is_target(name: str, module: nn.Module, target_modules: Collection[str]) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] in target_modules
