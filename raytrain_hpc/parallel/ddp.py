"""Distributed data parallel (DDP): gradients are summed over replicas in buckets, overlapped with the backward pass.

The method of PyTorch's DDP (Li et al. 2020, VLDB 13 (12)), on public autograd hooks. `DistributedDataParallel` itself
imports TorchDynamo (2 s and 74 MiB per worker), fails if a parameter gets no gradient on some rank, and averages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.blocking_collectives import wait_all

_NUM_IN_EXCHANGE = 2  # buckets in their first exchange before the oldest of them starts its second one


class GradientBucket(Protocol):
    """Some parameters of a stage, whose gradients are summed over replicas together."""

    parameters: list[nn.Parameter]

    def post_accumulate(self, parameter: Tensor) -> None:
        """Take note of a new gradient of one of the parameters. Called by autograd during a backward pass."""

    def post_backward(self, slot: int, *, split: bool) -> None:
        """Complete a backward pass. `slot`: number of the microbatch on this rank; `split`: weights follow later."""

    def post_backward_weight(self, slot: int) -> None:
        """Complete the weight gradients of a split backward pass."""

    def start(self, slot: int | None) -> None:
        """Start the sum over replicas. `slot`: of the pass that has computed the last gradients, None: it has ended."""

    def advance(self) -> None:
        """Start the second exchange of the sum, if it has one."""

    def finish(self) -> None:
        """Wait for the sum, and set the gradients."""


class DDPSync:
    """Gradient synchronization over replicas, in buckets, once per step.

    Gradients are summed, not averaged: the trainer divides by the tokens of the global batch. A parameter that gets no
    gradient on any rank keeps `grad` None, as on one rank.
    """

    def __init__(
        self,
        parameters: Mapping[int, Mapping[str, nn.Parameter]],
        make_bucket: Callable[[list[nn.Parameter]], GradientBucket],
        bucket_mib: int,
        get_module_parameter: Callable[[nn.Parameter], nn.Parameter] = lambda weight: weight,
    ):
        """`parameters`: by pipeline stage, then by name, in the order of the forward pass; frozen ones are ignored.

        `get_module_parameter`: returns the parameter whose gradient autograd computes. If that is a copy, it must have
        a hook that moves the gradient.
        """
        self._names: dict[Tensor, str] = {}
        self._buckets: list[GradientBucket] = []
        self._buckets_of_stage: dict[int, list[int]] = {}
        # Reverse order: backward passes compute gradients roughly from the last parameter to the first.
        for stage, named in reversed(list(parameters.items())):
            self._names |= {parameter: name for name, parameter in named.items()}
            trainable = [parameter for parameter in named.values() if parameter.requires_grad]
            buckets = [make_bucket(members) for members in split_into_buckets(trainable[::-1], bucket_mib * 2**20)]
            self._buckets_of_stage[stage] = list(range(len(self._buckets), len(self._buckets) + len(buckets)))
            self._buckets += buckets
        self._pending = [set[Tensor](bucket.parameters) for bucket in self._buckets]  # no gradient in the last pass yet
        self._num_started = 0
        self._is_last_pass, self._slot, self._stage = False, 0, 0  # of the current backward pass
        self._pass_parameters: set[Tensor] = set()  # those with a gradient in the current backward pass
        for index, bucket in enumerate(self._buckets):
            for position, parameter in enumerate(bucket.parameters):
                # No strong reference: the garbage collector finds no cycle through these hooks, so that would keep the
                # process group alive forever.
                hook = partial(_post_accumulate_grad, weakref.ref(self), index, position)
                get_module_parameter(parameter).register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Accumulate gradients locally; start to sum full buckets during the last backward pass of a stage in a step.

        If that pass is split, all buckets are summed in `finish_grad_sync` instead.
        """
        self._is_last_pass, self._slot, self._stage = is_last and not split, microbatch, stage
        self._pass_parameters.clear()
        yield
        for index in self._buckets_of_stage[stage]:
            self._buckets[index].post_backward(microbatch, split=split)

    def post_backward_weight(self, stage: int, microbatch: int, *, is_last: bool) -> None:
        """Take the weight gradients of a split backward pass. `finish_grad_sync` sums them."""
        for index in self._buckets_of_stage[stage]:
            self._buckets[index].post_backward_weight(microbatch)

    def finish_grad_sync(self) -> None:
        """Sum the remaining buckets, and wait for all of them. Call after the last backward pass of a step."""
        self._start(len(self._buckets), None)
        for bucket in self._buckets[max(0, len(self._buckets) - _NUM_IN_EXCHANGE) :]:
            bucket.advance()
        for bucket, pending in zip(self._buckets, self._pending, strict=True):
            bucket.finish()
            pending.update(bucket.parameters)
        self._num_started = 0

    def free_gathered_weights(self) -> None:
        """Do nothing: every replica has whole weights."""

    def on_grad_accumulated(self, index: int, position: int) -> None:
        """Pass the gradient of a parameter, by its position in a bucket, to the bucket.

        Called by hooks of autograd after it has accumulated the gradient. Raises ModelError for a second gradient of a
        parameter in one backward pass.
        """
        parameter = self._buckets[index].parameters[position]
        if parameter in self._pass_parameters:
            raise ModelError(
                f"model: {self._names[parameter]} got two gradients in one backward pass, and the first may already be "
                "all-reduced; use checkpoint(..., use_reentrant=False)"
            )
        self._pass_parameters.add(parameter)
        self._buckets[index].post_accumulate(parameter)
        if self._is_last_pass:
            self._pending[index].discard(parameter)
            if not self._pending[index]:
                num_full = next((i for i, pending in enumerate(self._pending) if pending), len(self._pending))
                self._start(num_full, self._slot)

    def _start(self, end: int, slot: int | None) -> None:
        """Start the sums of the buckets before `end`, in the same order on every rank."""
        in_pass = () if slot is None else self._buckets_of_stage[self._stage]
        for index in range(self._num_started, end):
            self._buckets[index].start(slot if index in in_pass else None)
            if index >= _NUM_IN_EXCHANGE:
                self._buckets[index - _NUM_IN_EXCHANGE].advance()
        self._num_started = max(self._num_started, end)


def _post_accumulate_grad(sync: weakref.ref[DDPSync], index: int, position: int, _: Tensor) -> None:
    if (sync_object := sync()) is not None:
        sync_object.on_grad_accumulated(index, position)


class AllReduceBucket:
    """The gradients of some parameters in one flat tensor, and one "has a gradient" flag per parameter.

    Implements `GradientBucket` by one all-reduce. Microbatches accumulate in the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup):
        self.parameters, self._group = parameters, group
        sizes = [parameter.numel() for parameter in parameters]
        self._flat = parameters[0].new_zeros(sum(sizes) + len(sizes), requires_grad=False)
        *buffers, self._has_grad = torch.split(self._flat, [*sizes, len(sizes)])
        self._views: dict[Tensor, Tensor] = {
            parameter: buffer.view(parameter.shape) for parameter, buffer in zip(parameters, buffers, strict=True)
        }
        self._works: list[dist.Work] = []

    def post_accumulate(self, parameter: Tensor) -> None:
        """Move a new gradient into the bucket, where later microbatches accumulate."""
        view = self._views[parameter]
        if parameter.grad is not view and parameter.grad is not None:
            view.copy_(parameter.grad)
            parameter.grad = view

    def post_backward(self, slot: int, *, split: bool) -> None:
        """Do nothing: gradients accumulate."""

    def post_backward_weight(self, slot: int) -> None:
        """Do nothing: gradients accumulate."""

    def start(self, slot: int | None) -> None:
        """Flag the parameters that have a gradient on this rank, zero the buffer of the others, and all-reduce."""
        self._has_grad.fill_(1.0)
        for index, parameter in enumerate(self.parameters):
            self.post_accumulate(parameter)  # split backward passes set gradients without calling hooks
            if parameter.grad is None:
                self._views[parameter].zero_()
                self._has_grad[index] = 0.0
        work = dist.all_reduce(self._flat, group=self._group, async_op=True)
        self._works = [] if work is None else [work]

    def advance(self) -> None:
        """Do nothing: an all-reduce is one exchange."""

    def finish(self) -> None:
        """Wait, and set the gradient of parameters that have one on other ranks only."""
        wait_all(self._works)
        self._works = []
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None and self._has_grad[index].item() > 0:
                parameter.grad = self._views[parameter]


def split_into_buckets(parameters: list[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield consecutive parameters of one dtype; a bucket is full once it has at least `limit_bytes`."""
    bucket: list[nn.Parameter] = []
    for parameter in parameters:
        if bucket and (bucket[0].dtype != parameter.dtype or sum(p.nbytes for p in bucket) >= limit_bytes):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
