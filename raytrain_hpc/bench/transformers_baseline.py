"""The model of transformers that has the sizes and the initial weights of the platform's."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

from raytrain_hpc.bench.peer_weights import build_hf_weights
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.huggingface.model_configs import build_hf_config


class LogitsOnly(nn.Module):
    """Wrapper that returns only the logits of a transformers model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, t, vocab_size] of tokens int64 [b, t]."""
        logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits


def build_transformers_model(spec: ModelSpec, seed: int, seq_len: int, num_threads: int = 1) -> nn.Module:
    """Build the causal language model of the family that `spec` belongs to, such as LlamaForCausalLM, in fp32.

    Raises ModelError if transformers has no such family.
    """
    hf_config = build_hf_config(spec, max(seq_len, spec.max_positions), "float32", {})
    model_class = getattr(transformers, hf_config["architectures"][0])
    model = model_class.from_pretrained(
        None,
        config=model_class.config_class(**hf_config),
        state_dict=build_hf_weights(spec, seed, num_threads),
        attn_implementation="sdpa",
        dtype=torch.float32,
    )
    return LogitsOnly(model.train())
