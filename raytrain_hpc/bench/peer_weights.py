"""The platform's initial weights under the names of Hugging Face, from which models of peers start."""

from __future__ import annotations

import torch
from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.huggingface.weight_mapping import build_weight_mappings
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import init_weights


@torch.no_grad()
def build_hf_weights(spec: ModelSpec, seed: int, num_threads: int = 1) -> dict[str, Tensor]:
    """Return the initial weights of a run with `run.seed=seed`, by their Hugging Face names, in fp32.

    `num_threads`: see `model.param_init.init_tensors`.

    Raises ModelError if no Hugging Face model family has such a model.
    """
    mappings = build_weight_mappings(spec)
    decoder = Decoder(spec)
    init_weights(decoder, seed, num_threads)
    parameters = dict(decoder.named_parameters())
    weights: dict[str, Tensor] = {}
    for mapping in mappings:
        region = tuple(
            slice(offset, offset + size) for offset, size in zip(mapping.box.offsets, mapping.box.sizes, strict=True)
        )
        weights[mapping.hf_name] = torch.empty(mapping.hf_shape)
        mapping.to_native(weights[mapping.hf_name]).copy_(parameters[mapping.name][region])
    return weights
