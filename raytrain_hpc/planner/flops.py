"""Floating-point operations of training, counted layer by layer."""

from __future__ import annotations

from raytrain_hpc.config.model_spec import ModelSpec

CAUSAL_CONVENTION = "6N + 6Lhs, causal counted once"
FULL_CONVENTION = "6N + 12Lhs, full attention"


def compute_flops_per_token(shape: ModelSpec, seq_len: int, *, causal: bool = True) -> float:
    """FLOPs a token of forward and backward in sequences of seq_len, matrix products only.

    6 a weight, N being the weights of the layers' products and the head, tied or not; the embedding is a lookup and
    costs none. Attention adds 12 h s a layer over the full square of scores, or 6 h s over its causal half, h being the
    channels of all heads (Narayanan et al. 2021, arXiv 2104.04473; Chowdhery et al. 2022, arXiv 2204.02311, appendix
    B). Recomputation is not counted: this is the work of the model, as model FLOPs utilisation wants it.
    """
    weights = shape.num_layers * shape.num_active_matmul_parameters() + shape.hidden_size * shape.vocab_size
    attention = (6 if causal else 12) * shape.num_layers * shape.attention_size * seq_len
    return float(6 * weights + attention)
