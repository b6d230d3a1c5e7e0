"""The forward and backward passes of a step over this rank's microbatches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raytrain_hpc.parallel.parallelize import Parallel, autocast
from raytrain_hpc.training.timers import Stopwatch
from raytrain_hpc.training.train_module import Batch, Task

Read = Callable[[int], Batch]  # the n-th microbatch of this rank


class Passes(Protocol):
    """How a rank takes microbatches through the model."""

    def train(self, step: int, count: int, read: Read) -> Tensor:
        """Leave the summed gradients of `count` microbatches on the parameters. Of each of them its sum of losses and
        its valid targets, fp64 [count, 2]; zeros where it is spare or this rank does not compute the loss."""

    def evaluate(self, count: int, read: Read) -> Tensor:
        """The same of `count` microbatches, without gradients."""


@dataclass
class WholeModel:
    """One microbatch after another through a model that is whole on this rank, as far as stages go."""

    task: Task
    parallel: Parallel
    dtype: str
    device: torch.device
    watch: Stopwatch

    def train(self, step: int, count: int, read: Read) -> Tensor:
        """As `Passes.train`."""
        module = self.parallel.modules[0].train()
        sums = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        for number in range(count):
            batch = read(number)
            with self.watch.on("forward"), autocast(self.dtype, self.device):
                output = self.task.forward(module, batch.inputs, step, batch)
                loss = self.task.loss(output, batch.targets)
            with self.watch.on("backward"), self.parallel.data.backward(0, number, last=number == count - 1):
                (loss * 0.0 if batch.spare else loss).backward()  # type: ignore[no-untyped-call]
            note(sums[number], loss, batch)
            del output, loss  # logits are the largest of all tensors: not beside the next microbatch
        with self.watch.on("communication"):
            self.parallel.finish()
        return sums

    def evaluate(self, count: int, read: Read) -> Tensor:
        """As `Passes.evaluate`."""
        module = self.parallel.modules[0].eval()
        sums = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        with torch.no_grad(), autocast(self.dtype, self.device):
            for number in range(count):
                batch = read(number)
                output = self.task.forward(module, batch.inputs, 0, batch)
                note(sums[number], self.task.loss(output, batch.targets), batch)
                del output
        return sums


def note(sums: Tensor, loss: Tensor, batch: Batch) -> None:
    """Set a microbatch's (sum of losses, valid targets), unless it is a spare one."""
    if not batch.spare:
        sums[0], sums[1] = loss.detach(), batch.tokens
