"""Initial weights as a pure function of (seed, name): every rank can draw any tensor, in any order, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.state.keyed_rng import derive_seed

_RESIDUAL = ("attention.out.weight", "down.weight", "experts.down")
_TABLES = ("embedding.weight", "positions.weight", "head.weight")
_NORMAL = (*_TABLES, "qkv.weight", "gate.weight", "up.weight", "router.weight", "experts.gate", "experts.up")


def init_tensor(spec: ModelSpec, name: str, size: Sequence[int], seed: int) -> Tensor:
    """The whole initial value, fp32 on CPU, of the Decoder parameter `name` of this size.

    GPT-2's scheme (Radford et al. 2019): weights normal(0, init_std), those that write to the residual stream divided
    by sqrt(2 num_layers), norms one, biases zero. Always drawn in fp32, so that runs of any type start alike.
    Raises ModelError for a name that no Decoder has.
    """
    if name.endswith("bias") or ".lora_B." in name:
        return torch.zeros(*size)
    if ".lora_A." in name:  # as peft, and torch's own linear layers, begin
        generator, bound = torch.Generator().manual_seed(derive_seed(seed, name)), size[1] ** -0.5
        return torch.empty(*size).uniform_(-bound, bound, generator=generator)
    if name.endswith("norm.weight"):
        return torch.ones(*size)
    if not name.endswith(_RESIDUAL + _NORMAL):
        raise ModelError(f"{name}: no initial value is defined for this parameter")
    std = spec.init_std
    if name.endswith(_RESIDUAL):
        std /= (2 * spec.num_layers) ** 0.5
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(*size).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int) -> None:
    """Fill every parameter of a whole Decoder, whatever its type and device; meta tensors need `to_empty` first."""
    for name, parameter in decoder.named_parameters():
        parameter.copy_(init_tensor(decoder.spec, name, parameter.shape, seed))
