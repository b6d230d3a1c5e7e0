"""What keeps the gradients of data-parallel ranks together, as the passes of a step see it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol


class DataParallel(Protocol):
    """What keeps the gradients of data-parallel ranks together."""

    def backward(self, stage: int, microbatch: int, *, last: bool, split: bool = False) -> AbstractContextManager[None]:
        """The context in which the backward pass of this rank's n-th microbatch through a stage runs.

        `last` of the step; `split`: gradients of weights come later.
        """

    def weights_done(self, stage: int, *, last: bool) -> None:
        """Called once the weights of a split backward pass have their gradients."""

    def finish(self) -> None:
        """Called after the last backward pass of a step: all gradients are complete when it returns."""


class Alone:
    """One rank that holds everything and has nobody to synchronise with."""

    def backward(self, stage: int, microbatch: int, *, last: bool, split: bool = False) -> AbstractContextManager[None]:
        """The context a backward pass runs in."""
        return nullcontext()

    def weights_done(self, stage: int, *, last: bool) -> None:
        """Nothing to synchronise."""

    def finish(self) -> None:
        """Nothing to wait for."""


class Several:
    """Parts of the parameters whose gradients are kept together in different ways."""

    def __init__(self, parts: Sequence[DataParallel]):
        self._parts = parts

    @contextmanager
    def backward(self, stage: int, microbatch: int, *, last: bool, split: bool = False) -> Iterator[None]:
        """Every part's context."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.backward(stage, microbatch, last=last, split=split))
            yield

    def weights_done(self, stage: int, *, last: bool) -> None:
        """Tell every part."""
        for part in self._parts:
            part.weights_done(stage, last=last)

    def finish(self) -> None:
        """Finish every part, in one order on all ranks."""
        for part in self._parts:
            part.finish()
