"""Context of a user's script: its rank, set by the trainer that runs the script and read by `rt.attach`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ScriptRank(Protocol):
    """The rank of a run, as a user's script sees it through `rt.attach`; see `script.ScriptRun` for the methods."""

    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def has_started(self) -> bool:
        """Whether the first step of the script has begun."""

    def attach(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        objects: Mapping[str, Any],
        plan: Mapping[str, str] | None,
    ) -> None:
        """Take over the state of models, optimizers and objects."""

    def add_object(self, name: str, item: Any) -> None:
        """Take over the state of another object."""

    def steps(self, count: int | None) -> Iterator[int]:
        """Yield the numbers of the remaining steps."""

    def get_local_rows(self, num_rows: int) -> range:
        """Return the rows of a batch of `num_rows` that this rank computes."""

    def begin_draw(self) -> tuple[int, int]:
        """Return what tells the next batch from others: its step, and its number among those drawn in the step."""

    def seed_rows(self, draw: tuple[int, int]) -> AbstractContextManager[Callable[[int], None]]:
        """Return a context in which each row of a batch is read with generators seeded by a function of the row."""

    def move_to_device(self, batch: Any) -> Any:
        """Return a batch of nested tensors on the rank's device."""

    def backward(self, loss: Tensor) -> Tensor:
        """Compute gradients of the mean loss over all ranks."""

    def iter_microbatches(self, num_local_rows: int) -> Iterator[slice]:
        """Yield the rows of the microbatches that this rank's rows are split into."""

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a norm of at most `max_norm`, and return the norm before."""

    @property
    def loss(self) -> float:
        """Loss of the step so far."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the record of this step."""

    def save(self) -> None:
        """Request a checkpoint of this step."""

    def evaluation(self) -> AbstractContextManager[dict[str, float]]:
        """Return a context for an evaluation, with the dict that takes its metrics."""

    def count_progress(self) -> None:
        """Tell the watchdog that an evaluation makes progress."""

    def all_reduce(self, values: Tensor) -> None:
        """Sum values over all ranks, in place."""


CURRENT_RANK: ContextVar[ScriptRank | None] = ContextVar("script_rank", default=None)
"""The rank whose script this thread runs; None outside of a run."""
