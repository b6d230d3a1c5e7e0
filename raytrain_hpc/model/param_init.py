"""Parameter initialization as a pure function of (seed, name), so that any rank can initialize any tensor."""

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
    """Return the initial value of a Decoder parameter, as the full tensor in fp32 on CPU.

    name: canonical name; size: full shape. The scheme of GPT-2 (Radford et al. 2019): weights are normal(0, init_std),
    divided by sqrt(2 num_layers) if they write to the residual stream; norms are one, biases zero. Values are drawn in
    fp32, so that they do not depend on the dtype of the run. Raises ModelError for an unknown name.
    """
    if name.endswith("bias") or ".lora_B." in name:
        return torch.zeros(*size)
    if ".lora_A." in name:  # as in peft and nn.Linear
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
    """Initialize all parameters of an unsharded Decoder, in place. On the meta device, call `to_empty` first."""
    for name, parameter in decoder.named_parameters():
        parameter.copy_(init_tensor(decoder.spec, name, parameter.shape, seed))
