"""Plain data parallel: every rank holds everything, gradients are summed in buckets behind the backward pass.

The method of PyTorch's DDP (Li et al. 2020, VLDB 13 (12)), on public hooks. The class itself would import TorchDynamo
(2 s and 74 MiB a worker), stops at a parameter that some rank's loss did not reach, and takes averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.blocking_collectives import wait_all


class DDPSync:
    """Parameters whose gradients are summed over one group, once a step.

    Summed, not averaged: the loop divides by the tokens of the global batch. A parameter that no rank's loss reached
    keeps no gradient, as on one rank.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup, bucket_mib: int):
        """`parameters` in the order of the forward pass; those that are frozen stay out of it."""
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._group = group
        trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        # Backward passes give gradients roughly in this order.
        self._buckets = [_Bucket(part) for part in split_into_buckets(trained[::-1], bucket_mib * 2**20)]
        self._num_launched = 0
        self._works: list[dist.Work] = []
        self._is_last_pass = False
        self._pass_parameters: set[Tensor] = set()  # by this backward pass
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                # Weakly: Python finds no circle through these hooks, and this one would hold on to the group for ever.
                hook = partial(_post_accumulate_grad, weakref.ref(self), weakref.ref(bucket))
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Gradients pile up locally until a stage's last backward pass of the step, which hides the sums.

        Where it is split they wait for `finish`.
        """
        self._is_last_pass = is_last and not split
        self._pass_parameters.clear()
        yield

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """The sums wait for `finish`."""

    def finish_grad_sync(self) -> None:
        """Sum what is left after the last backward pass of a step, and wait for all sums."""
        self._launch(len(self._buckets))
        wait_all(self._works)
        self._works.clear()
        self._num_launched = 0
        for bucket in self._buckets:
            bucket.adopt_remote_grads()
            bucket.pending = set(bucket.parameters)

    def on_grad_accumulated(self, bucket: _Bucket, parameter: Tensor) -> None:
        """A backward pass has added to a parameter's gradient."""
        if parameter in self._pass_parameters:
            raise ModelError(
                f"model: {self._names[parameter]} got two gradients in one backward pass, and the first may be on its "
                "way already; recompute with use_reentrant=False"
            )
        self._pass_parameters.add(parameter)
        bucket.store_grad(parameter)
        if self._is_last_pass:
            bucket.pending.discard(parameter)
            if not bucket.pending:
                self._launch(next((i for i, other in enumerate(self._buckets) if other.pending), len(self._buckets)))

    def _launch(self, end: int) -> None:
        """Start summing all buckets before `end`, in one order on every rank, whatever the order they fill in."""
        for bucket in self._buckets[self._num_launched : end]:
            bucket.mark_grads()
            work = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            if work is not None:
                self._works.append(work)
        self._num_launched = max(self._num_launched, end)


def _post_accumulate_grad(sync: weakref.ref[DDPSync], bucket: weakref.ref[_Bucket], parameter: Tensor) -> None:
    owner, part = sync(), bucket()
    if owner is not None and part is not None:
        owner.on_grad_accumulated(part, parameter)


class _Bucket:
    """The gradients of some parameters in one flat tensor, and a mark for each one reached by some rank's loss."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.pending: set[Tensor] = set(parameters)  # those that a last backward pass has still to reach
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes) + len(sizes), requires_grad=False)
        *parts, self._has_grad = torch.split(self.flat, [*sizes, len(sizes)])
        self._views: dict[Tensor, Tensor] = {
            parameter: part.view(parameter.shape) for parameter, part in zip(parameters, parts, strict=True)
        }

    def store_grad(self, parameter: Tensor) -> None:
        """Move a fresh gradient into the bucket; later microbatches add to it there."""
        view = self._views[parameter]
        if parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = view

    def mark_grads(self) -> None:
        """Mark what this rank's loss reached; the rest counts as zeros."""
        self._has_grad.fill_(1.0)
        for place, parameter in enumerate(self.parameters):
            self.store_grad(parameter)  # a split backward pass set it where no hook saw it
            if parameter.grad is None:
                self._views[parameter].zero_()
                self._has_grad[place] = 0.0

    def adopt_remote_grads(self) -> None:
        """Give a parameter that only other ranks' losses reached its gradient; one that none reached keeps none."""
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None and self._has_grad[place].item() > 0:
                parameter.grad = self._views[parameter]


def split_into_buckets(parameters: list[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Runs of parameters of one dtype, each closed once it holds `limit_bytes`."""
    run: list[nn.Parameter] = []
    for parameter in parameters:
        if run and (run[0].dtype != parameter.dtype or sum(p.nbytes for p in run) >= limit_bytes):
            yield run
            run = []
        run.append(parameter)
    if run:
        yield run
