"""Learning rate as a pure function of the step."""

from __future__ import annotations

from math import cos, pi, sqrt

from raytrain_hpc.config.schema import AUTO, TrainConfig


def compute_peak_lr(train: TrainConfig) -> float:
    """`train.lr` scaled with the global batch: linearly (Goyal et al. 2017) or by the square root (Krizhevsky 2014)."""
    if train.lr_scaling == "none":
        return train.lr
    ratio = train.global_batch / train.lr_base_batch
    return train.lr * (ratio if train.lr_scaling == "linear" else sqrt(ratio))


def should_evaluate(train: TrainConfig, step: int, last_step: int) -> bool:
    """Whether an evaluation follows committed step `step` of a training that ends at step `last`."""
    return step == last_step or (train.eval_every > 0 and step % train.eval_every == 0)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (0-based).

    Linear warmup to the peak, then cosine to the minimum (Loshchilov and Hutter 2017), or stay and fall linearly over
    the last `decay_fraction` of the steps (warmup-stable-decay, Hu et al. 2024, arXiv 2404.06395), or stay.
    """
    peak = compute_peak_lr(train)
    low = (0.1 if train.min_lr == AUTO else float(train.min_lr) / train.lr) * peak
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    if train.schedule == "constant":
        return peak
    if train.schedule == "cosine":
        done = (step - train.warmup) / max(1, train.steps - train.warmup)
        return low + (peak - low) * 0.5 * (1 + cos(pi * min(1.0, done)))
    decay = train.decay_fraction * train.steps
    left = train.steps - step
    return peak if left >= decay else low + (peak - low) * left / decay
