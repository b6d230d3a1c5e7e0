"""Gradient synchronization of data-parallel ranks: the interface that the forward-backward code uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol


class GradientSync(Protocol):
    """Synchronization of gradients over data-parallel ranks."""

    def backward_context(
        self, stage: int, microbatch: int, *, is_last: bool, split: bool = False
    ) -> AbstractContextManager[None]:
        """Return the context manager in which to run the backward pass of a microbatch through a stage.

        `microbatch`: index among those of this rank. `is_last`: the last backward pass of the stage in this step.
        `split`: weight gradients are deferred.
        """

    def post_backward_weight(self, stage: int, microbatch: int, *, is_last: bool) -> None:
        """Reduce weight gradients that a split backward pass has deferred. Call after computing them."""

    def finish_grad_sync(self) -> None:
        """Complete all gradients. Call after the last backward pass of a step."""

    def free_gathered_weights(self) -> None:
        """Drop whole weights that a forward pass has gathered. Call before the sharded ones are changed."""


class NoSync:
    """Gradient synchronization of a single rank: none."""

    def backward_context(
        self, stage: int, microbatch: int, *, is_last: bool, split: bool = False
    ) -> AbstractContextManager[None]:
        """Return a null context."""
        return nullcontext()

    def post_backward_weight(self, stage: int, microbatch: int, *, is_last: bool) -> None:
        """Do nothing."""

    def finish_grad_sync(self) -> None:
        """Do nothing."""

    def free_gathered_weights(self) -> None:
        """Do nothing: weights are whole."""


class CompositeSync:
    """Several gradient synchronizations, each for some of the parameters."""

    def __init__(self, syncs: Sequence[GradientSync]):
        self._syncs = syncs

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Enter the contexts of all synchronizations."""
        with ExitStack() as stack:
            for sync in self._syncs:
                stack.enter_context(sync.backward_context(stage, microbatch, is_last=is_last, split=split))
            yield

    def post_backward_weight(self, stage: int, microbatch: int, *, is_last: bool) -> None:
        """Call `post_backward_weight` of each synchronization."""
        for sync in self._syncs:
            sync.post_backward_weight(stage, microbatch, is_last=is_last)

    def finish_grad_sync(self) -> None:
        """Finish each synchronization, in the same order on all ranks."""
        for sync in self._syncs:
            sync.finish_grad_sync()

    def free_gathered_weights(self) -> None:
        """Call `free_gathered_weights` of each synchronization."""
        for sync in self._syncs:
            sync.free_gathered_weights()
