"""Check of a user's loss function on the first microbatch of a run: does it return a mean instead of a sum?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raytrain_hpc.runtime.worker_spec import LossFunction
from raytrain_hpc.torch_device import get_device_module, is_accelerator
from raytrain_hpc.torch_private import is_mean_over_rows

MEAN_LOSS_WARNING = (
    "warning: loss: it returns a mean, as far as the first microbatch tells, where a sum over {} is expected: the "
    'learning rate, clipping and train/loss do not mean what they say; use reduction="sum"'
)
_TOLERANCE = 0.01  # relative: of a loss in bf16
_IGNORED_TARGET = -100


class LossCheck:
    """Check of the first loss of a run. Every rank makes it, since a loss function may contain collectives."""

    def __init__(self, warn: Callable[[str], None] | None):
        """Initialize the check. `warn`: prints a line; None: another rank does."""
        self._warn, self._is_done = warn, False

    def check_targets(self, loss_function: LossFunction, output: object, targets: Tensor, loss: Tensor) -> None:
        """Warn if `loss`, of the module's output and `targets` [b, t], is the mean of the losses of two halves.

        A sum of losses is the sum of those of the halves instead. Calls the loss function twice, without gradients.
        """
        if self._is_done:
            return
        self._is_done = True
        if type(output) is Tensor and output.shape[:2] == targets.shape:
            is_mean = is_mean_of_halves(loss_function, output.detach(), targets, loss.detach())
            self._report("the valid targets", is_mean=is_mean)

    def check_rows(self, loss: Tensor, num_samples: int) -> None:
        """Warn if the last operation of `loss` is a mean over the samples. Calls no function of the user."""
        if not self._is_done:
            self._is_done = True
            self._report("the samples, or (sum, count),", is_mean=is_mean_over_rows(loss, num_samples))

    def _report(self, subject: str, *, is_mean: bool) -> None:
        if is_mean and self._warn is not None:
            self._warn(MEAN_LOSS_WARNING.format(subject))


def is_mean_of_halves(loss_function: LossFunction, output: Tensor, targets: Tensor, loss: Tensor) -> bool:
    """Return whether `loss` is the mean of the losses of two halves of the batch, weighted by their valid targets.

    False if it cannot be told: for a loss of zero, a batch of one position, or a function that takes no half batch.
    """
    dim = 0 if targets.shape[0] > 1 else 1
    if targets.shape[dim] < 2:
        return False
    halves = list(zip(output.tensor_split(2, dim), targets.tensor_split(2, dim), strict=True))
    try:
        with torch.no_grad(), _keep_random_state(output.device):
            values = [float(loss_function(*half)) for half in halves]
    except Exception:  # a loss of whole batches only, which is legal
        return False
    counts = [int((half_targets != _IGNORED_TARGET).sum()) for _, half_targets in halves]
    whole, mean = float(loss), sum(v * c for v, c in zip(values, counts, strict=True)) / max(1, sum(counts))
    return abs(whole - mean) <= _TOLERANCE * abs(whole) and abs(whole - sum(values)) > 0.1 * abs(whole)


@contextmanager
def _keep_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of torch's generators, on the CPU and on `device`, at the end of the context."""
    module = get_device_module(device) if is_accelerator(device) else None
    state = None if module is None else module.get_rng_state(device)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if module is not None:
            module.set_rng_state(state, device)
