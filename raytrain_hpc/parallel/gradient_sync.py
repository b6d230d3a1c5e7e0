"""What keeps the gradients of data-parallel ranks together, as the passes of a step see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol


class GradientSync(Protocol):
    """What keeps the gradients of data-parallel ranks together."""

    def backward_context(
        self, stage: int, microbatch: int, *, is_last: bool, split: bool = False
    ) -> AbstractContextManager[None]:
        """The context in which the backward pass of this rank's n-th microbatch through a stage runs.

        `last` of the step; `split`: gradients of weights come later.
        """

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """Called once the weights of a split backward pass have their gradients."""

    def finish_grad_sync(self) -> None:
        """Called after the last backward pass of a step: all gradients are complete when it returns."""


class NoSync:
    """One rank that holds everything and has nobody to synchronise with."""

    def backward_context(
        self, stage: int, microbatch: int, *, is_last: bool, split: bool = False
    ) -> AbstractContextManager[None]:
        """The context a backward pass runs in."""
        return nullcontext()

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """Nothing to synchronise."""

    def finish_grad_sync(self) -> None:
        """Nothing to wait for."""


class CompositeSync:
    """Parts of the parameters whose gradients are kept together in different ways."""

    def __init__(self, syncs: Sequence[GradientSync]):
        self._syncs = syncs

    @contextmanager
    def backward_context(self, stage: int, microbatch: int, *, is_last: bool, split: bool = False) -> Iterator[None]:
        """Every part's context."""
        with ExitStack() as stack:
            for part in self._syncs:
                stack.enter_context(part.backward_context(stage, microbatch, is_last=is_last, split=split))
            yield

    def post_backward_weight(self, stage: int, *, is_last: bool) -> None:
        """Tell every part."""
        for part in self._syncs:
            part.post_backward_weight(stage, is_last=is_last)

    def finish_grad_sync(self) -> None:
        """Finish every part, in one order on all ranks."""
        for part in self._syncs:
            part.finish_grad_sync()
