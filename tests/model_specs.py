"""Model specs from settings, for tests of the planner."""

from __future__ import annotations

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import ModelSpec, resolve_model_spec


def make_model_spec(*words: str, seq_len: int) -> ModelSpec:
    """Return the spec of these settings, on top of a small model with a vocabulary of 65."""
    config = load_config(None, ["model.vocab_size=65", "model.hidden_size=32", "model.num_heads=4", *words])
    return resolve_model_spec(config.model, vocab_size=None, seq_len=seq_len)
