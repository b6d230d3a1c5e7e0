"""The rank whose script a thread runs: set by the trainer that runs the script, read by `rt.attach` in the script."""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class ScriptRank(Protocol):
    """The rank of a run, as a user's script sees it through `rt.attach`; see `script.ScriptRun` for the methods."""

    device: torch.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Take over the state of model, optimizer and scheduler."""

    def steps(self, count: int | None) -> Iterator[int]:
        """Yield the numbers of the remaining steps."""

    def get_local_rows(self, num_rows: int) -> range:
        """Return which of the `rows` rows of a batch are this rank's."""

    def backward(self, loss: Tensor) -> Tensor:
        """Compute gradients of the mean loss over all ranks."""


CURRENT_RANK: ContextVar[ScriptRank | None] = ContextVar("script_rank", default=None)
"""None in a thread that runs no script of a run."""
