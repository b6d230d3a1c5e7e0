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
from raytrain_hpc.state.shard_spec import Cut

TARGETS = ("qkv", "out", "gate", "up", "down")
MARK = ".lora_"  # in the names of what is trained
_BASE = ".base_layer."


@dataclass(frozen=True)
class Adapters:
    """`targets`: which linear layers of a block, of TARGETS."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def adapt(decoder: Decoder, adapters: Adapters) -> dict[str, Cut]:
    """Put adapters, without values, beside the linear layers of a decoder on the meta device, and freeze all else.

    Returns the cuts of the weights that they are beside, which have their old canonical names. Raises ModelError where
    no layer is one of the targets.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names = [name for name, module in decoder.named_modules() if _is_target(name, module, adapters.targets)]
    if not names:
        raise ModelError(f"train.lora_targets={list(adapters.targets)}: this decoder has no such layer")
    config = LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=names)  # type: ignore[arg-type]
    with torch.device("meta"):
        inject_adapter_in_model(config, decoder)
    named = dict(decoder.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(MARK in name)
    return {name: Cut.whole(name.replace(_BASE, "."), one.shape) for name, one in named.items() if _BASE in name}


def _is_target(name: str, module: nn.Module, targets: Collection[str]) -> bool:
    return isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
