"""Learning rate as a pure function of the step."""

from __future__ import annotations

from collections.abc import Callable
from math import cos, isfinite, pi, sqrt

from raytrain_hpc.config.schema import AUTO, Config, EvalConfig
from raytrain_hpc.errors import CallbackError

LRSchedule = Callable[[int], float]  # optimizer step (0-based) -> factor of the peak learning rate


def compute_peak_lr(config: Config) -> float:
    """Return `optimizer.lr` scaled with the global batch.

    The scale is linear (Goyal et al. 2017) or the square root (Krizhevsky 2014).
    """
    lr, scheduler = config.optimizer.lr, config.lr_scheduler
    if scheduler.batch_scaling == "none":
        return lr
    ratio = config.train.global_batch_size / scheduler.base_batch_size
    return lr * (ratio if scheduler.batch_scaling == "linear" else sqrt(ratio))


def should_evaluate(config: EvalConfig, step: int, last_step: int) -> bool:
    """Return whether an evaluation follows committed step `step` of a run that ends at `last_step`."""
    return step == last_step or (config.interval > 0 and step % config.interval == 0)


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based).

    Linear warmup to the peak, then by `lr_scheduler.name`: cosine decay to the minimum (Loshchilov and Hutter 2017);
    linear or polynomial decay to it; the inverse square root of the step number (Vaswani et al. 2017), not below the
    minimum; constant with a linear decay over the last `decay_fraction` of the steps (warmup-stable-decay, Hu et al.
    2024, arXiv 2404.06395); or constant.
    """
    scheduler, steps = config.lr_scheduler, config.train.steps
    peak = compute_peak_lr(config)
    min_lr = (0.1 if scheduler.min_lr == AUTO else float(scheduler.min_lr) / config.optimizer.lr) * peak
    warmup = scheduler.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    match scheduler.name:
        case "constant":
            return peak
        case "cosine":
            return min_lr + (peak - min_lr) * 0.5 * (1 + cos(pi * progress))
        case "linear":
            return min_lr + (peak - min_lr) * (1 - progress)
        case "polynomial":
            return min_lr + (peak - min_lr) * float((1 - progress) ** scheduler.power)
        case "inverse_sqrt":
            return max(min_lr, peak * sqrt(max(1, warmup) / (step + 1)))
    decay, remaining_steps = scheduler.decay_fraction * steps, steps - step  # wsd
    return peak if remaining_steps >= decay else min_lr + (peak - min_lr) * remaining_steps / decay


class LearningRate:
    """The learning rate of a run by step: that of `lr_scheduler`, or the peak times a factor of the user's."""

    def __init__(self, config: Config, schedule: LRSchedule | None = None):
        """`schedule`: a pure function of the step, since a run that resumes calls it again for any step."""
        self._config, self._schedule = config, schedule

    def __call__(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (0-based).

        Raises CallbackError if the user's schedule fails, or if its factor is negative or not finite.
        """
        if self._schedule is None:
            return learning_rate(self._config, step)
        try:
            factor = float(self._schedule(step))
        except Exception as error:  # of any type: the code is the user's
            reason = (str(error).splitlines() or [""])[0]
            raise CallbackError(f"lr_schedule({step}): {type(error).__name__}: {reason}; return a number") from error
        if not isfinite(factor) or factor < 0:
            raise CallbackError(f"lr_schedule({step}) = {factor}: return a finite factor of optimizer.lr, at least 0")
        return compute_peak_lr(self._config) * factor
