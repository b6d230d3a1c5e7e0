"""Model FLOPs of training, counted layer by layer."""

from __future__ import annotations

from raytrain_hpc.config.model_spec import ModelSpec

CAUSAL_CONVENTION = "6N + 6Lhs, causal counted once"
FULL_CONVENTION = "6N + 12Lhs, full attention"


def compute_flops_per_token(spec: ModelSpec, seq_len: int, *, causal: bool = True) -> float:
    """Return the FLOPs per token of forward and backward pass in sequences of `seq_len`, counting matrix products only.

    6 per weight, for the N weights of the layers' products and of the head, tied or not; the embedding is a lookup and
    costs nothing. Attention adds 12 h s per layer for the full square of scores, or 6 h s for its causal half, where h
    is the channels of all heads (Narayanan et al. 2021, arXiv 2104.04473; Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). Recomputation is not counted, as model FLOPs utilization requires.
    """
    weights = spec.num_layers * spec.count_active_matmul_parameters() + spec.hidden_size * spec.vocab_size
    attention = (6 if causal else 12) * spec.num_layers * spec.attention_size * seq_len
    return float(6 * weights + attention)
