"""Elastic training of an existing PyTorch script: five added lines, started with `raytrain-hpc run SCRIPT`.

    import raytrain_hpc as rt
    run = rt.attach(model, optimizer)
    for step in run.steps(1000):
        inputs, targets = run.local_batch(batch(step))
        loss = run.backward(loss)

Started with plain `python`, the same script trains in one process as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain_hpc.errors import ModelError
from raytrain_hpc.runtime.script_context import CURRENT_RANK

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from raytrain_hpc.runtime.script_context import ScriptRank

Batch = TypeVar("Batch")


class ScriptRun:
    """Handle of a training script to its run, returned by `attach`. Without a run, it represents a single process."""

    def __init__(self, rank: ScriptRank | None):
        self._rank = rank

    @property
    def device(self) -> torch.device:
        """The rank's device; without a run, the CPU."""
        import torch

        return torch.device("cpu") if self._rank is None else self._rank.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the one that should print and write files."""
        return self._rank is None or self._rank.is_main_process

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the remaining steps, starting at 0 in a new run. `count` must equal train.steps.

        A step is committed when the next one is requested: recovery restores model, optimizer and scheduler as of that
        moment. A rank may take minutes between two calls of `backward`, in which the others wait for it. In a run,
        torch's random generator is reseeded at every step, identically on all ranks.
        """
        if self._rank is not None:
            yield from self._rank.steps(count)
            return
        if count is None:
            raise ModelError("steps: count is missing; without a run there is no train.steps to take it from")
        yield from range(count)

    def local_batch(self, batch: Batch) -> Batch:
        """Return this rank's rows of a global batch, on its device. Call once per step, before `backward`.

        All ranks must pass the same batch: a tensor with one sample per row, or a tuple, list or mapping of such
        tensors. A mapping is returned as a dict.
        """
        if self._rank is None:
            return batch
        local_rows = self._rank.get_local_rows(_count_rows(batch))
        local_batch: Batch = _slice_rows(batch, slice(local_rows.start, local_rows.stop), self._rank.device)
        return local_batch

    def backward(self, loss: Tensor) -> Tensor:
        """Compute gradients and return the mean loss over the global batch. Call once per step, for `loss.backward()`.

        `loss` is the mean over this rank's rows. The gradients are those of the mean over all rows, on every rank.
        Gradients accumulated over several steps are not part of the saved state: recovery starts without them.
        """
        if self._rank is not None:
            return self._rank.backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def attach(model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> ScriptRun:
    """Register model, optimizer and learning-rate scheduler with the run of this script, if there is one.

    In a resumed or recovered run, their state is restored. The state of `scheduler` must consist of plain numbers.
    """
    rank = CURRENT_RANK.get()
    if rank is not None:
        rank.attach(model, optimizer, scheduler)
    return ScriptRun(rank)


def _count_rows(batch: Any) -> int:
    items = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(items, list | tuple):
        sizes = {_count_rows(item) for item in items}
        if len(sizes) != 1:
            raise ModelError(f"local_batch: tensors have {sorted(sizes)} rows; all need the same number")
        return sizes.pop()
    if not hasattr(items, "to") or not getattr(items, "shape", None):
        raise ModelError(f"local_batch: a batch holds {type(items).__name__}; pass tensors with one row per sample")
    return int(items.shape[0])


def _slice_rows(batch: Any, rows: slice, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {key: _slice_rows(item, rows, device) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        items = [_slice_rows(item, rows, device) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch[rows].to(device)
