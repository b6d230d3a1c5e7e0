"""Every metric key and its formula, documented once. The keys are the TensorBoard tags too."""

from __future__ import annotations

METRIC_KEYS = {
    "step": "Optimizer steps committed, this one included: the first step writes 1.",
    "train/loss": "Sum of the token losses over the global batch divided by its valid tokens, in nats.",
    "train/lr": "Learning rate of this step.",
    "train/grad_norm": "Euclidean norm of the gradient of train/loss, before clipping.",
    "train/tokens": "Tokens trained on since the run's first step (sequences x length).",
    "throughput/tokens_per_sec": "Tokens of the step over time/step_s.",
    "throughput/tokens_per_sec_per_device": "The same, divided by the number of workers.",
    "throughput/mfu": "Model FLOPs of the step over time/step_s x devices x peak; null where the peak is unknown.",
    "time/unix": "When the step was committed.",
    "time/step_s": "From the end of the step before to its own end on rank 0, without checkpoints and evaluations.",
    "time/data_s": "Part of it spent waiting for tokens.",
    "time/forward_s": "Part of it in forward passes of rank 0, exchanges inside them included.",
    "time/backward_s": "The same of backward passes; reductions run behind them.",
    "time/communication_s": "After the last backward pass: waiting for reductions, sums over ranks, gradient norm.",
    "time/optimizer_s": "The optimizer's own step.",
    "time/checkpoint_s": "What a checkpoint took after it (the copy; the writing goes on behind).",
    "memory/peak_gib": "Peak memory of rank 0's device, or resident memory of its process on CPU.",
    "memory/weights_gib": "Weights that rank 0 holds between two steps,",
    "memory/gradients_gib": "gradients that its optimizer is given,",
    "memory/moments_gib": "and the optimizer's moments, wherever they live.",
    "elastic/world_size": "Ranks that made the step.",
    "elastic/generation": "Generation of the process groups: one more after each restart.",
    "val/loss": "Sum of the token losses over the validation windows divided by their tokens, where evaluated.",
}

RANK_STATISTIC_KEYS = (
    *(f"time/{part}_s" for part in ("step", "data", "forward", "backward", "communication", "optimizer")),
    "memory/peak_gib",
)
"""Keys whose statistics over all ranks are written every observe.ranks_every steps."""

STATISTICS = {"mean": "mean", "min": "least", "max": "largest", "std": "standard deviation"}

METRIC_KEYS |= {
    f"ranks/{name}/{kind}": f"Every observe.ranks_every steps: {what} over all ranks of {name}."
    for name in RANK_STATISTIC_KEYS
    for kind, what in STATISTICS.items()
}


def compute_mfu(tokens_per_sec: float, flops_per_token: float, devices: int, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilisation: achieved over peak FLOP/s (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
    if peak_tflops is None:
        return None
    return tokens_per_sec * flops_per_token / (devices * peak_tflops * 1e12)
