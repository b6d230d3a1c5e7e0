"""Learning rate as a pure function of the step."""

from __future__ import annotations

from math import cos, pi, sqrt

from raytrain_hpc.config.schema import AUTO, TrainConfig


def compute_peak_lr(train: TrainConfig) -> float:
    """Return `train.lr` scaled with the global batch.

    The scale is linear (Goyal et al. 2017) or the square root (Krizhevsky 2014).
    """
    if train.lr_scaling == "none":
        return train.lr
    ratio = train.global_batch / train.lr_base_batch
    return train.lr * (ratio if train.lr_scaling == "linear" else sqrt(ratio))


def should_evaluate(train: TrainConfig, step: int, last_step: int) -> bool:
    """Return whether an evaluation follows committed step `step` of a run that ends at `last_step`."""
    return step == last_step or (train.eval_every > 0 and step % train.eval_every == 0)


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based).

    Linear warmup to the peak, then by `train.schedule`: cosine decay to the minimum (Loshchilov and Hutter 2017);
    constant with a linear decay over the last `decay_fraction` of the steps (warmup-stable-decay, Hu et al. 2024, arXiv
    2404.06395); or constant.
    """
    peak = compute_peak_lr(train)
    min_lr = (0.1 if train.min_lr == AUTO else float(train.min_lr) / train.lr) * peak
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    if train.schedule == "constant":
        return peak
    if train.schedule == "cosine":
        progress = (step - train.warmup) / max(1, train.steps - train.warmup)
        return min_lr + (peak - min_lr) * 0.5 * (1 + cos(pi * min(1.0, progress)))
    decay = train.decay_fraction * train.steps
    remaining_steps = train.steps - step
    return peak if remaining_steps >= decay else min_lr + (peak - min_lr) * remaining_steps / decay
