"""A plain PyTorch script becomes one that any number of workers run: five lines, and `raytrain-hpc run SCRIPT`.

    import raytrain_hpc as rt
    run = rt.attach(model, optimizer)
    for step in run.steps(1000):
        inputs, targets = run.local_batch(batch(step))
        loss = run.backward(loss)

Run by python alone, the same script trains by itself as it did before.
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
    """What a script asks of the run that it is a rank of."""

    def __init__(self, rank: ScriptRank | None):
        self._rank = rank

    @property
    def device(self) -> torch.device:
        """Where the model is, in a run; the CPU alone."""
        import torch

        return torch.device("cpu") if self._rank is None else self._rank.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which may print and write what all would print and write."""
        return self._rank is None or self._rank.is_main_process

    def steps(self, count: int | None = None) -> Iterator[int]:
        """The numbers of the steps that are left, from 0 on in a new run; `count` has to be train.steps.

        A step is committed when the next one is asked for: model, optimizer and scheduler are as they were then when
        another one goes on. Between two calls of `backward` a rank may take minutes: the others wait for it. In a run,
        torch's random numbers begin anew in every step, alike on all ranks.
        """
        if self._rank is not None:
            yield from self._rank.steps(count)
            return
        if count is None:
            raise ModelError("steps: how many? alone there is no train.steps to take them from")
        yield from range(count)

    def local_batch(self, batch: Batch) -> Batch:
        """This rank's rows, on its device, of a batch that all ranks have alike: of a tensor, or of all tensors in a
        tuple, a list or a mapping, which becomes a dict. Once a step, before `backward`."""
        if self._rank is None:
            return batch
        mine = self._rank.get_local_rows(_count_rows(batch))
        rows: Batch = _slice_rows(batch, slice(mine.start, mine.stop), self._rank.device)
        return rows

    def backward(self, loss: Tensor) -> Tensor:
        """For loss.backward(): `loss` is the mean over this rank's rows; gradients become those of the mean over all
        rows of the batch, on every rank, and that mean is returned. Once a step. Gradients that the optimizer is given
        only after several steps add up as ever, and are no state: whoever goes on in between begins without them."""
        if self._rank is not None:
            return self._rank.backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def attach(model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> ScriptRun:
    """Hand the state of these over to the run that this script is a rank of, if it is one.

    In a run that goes on they are given its state. `scheduler`: of the learning rate; its state is plain numbers.
    """
    rank = CURRENT_RANK.get()
    if rank is not None:
        rank.attach(model, optimizer, scheduler)
    return ScriptRun(rank)


def _count_rows(batch: Any) -> int:
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(parts, list | tuple):
        sizes = {_count_rows(part) for part in parts}
        if len(sizes) != 1:
            raise ModelError(f"share: parts of one batch have {sorted(sizes)} rows; all need the same number")
        return sizes.pop()
    if not hasattr(parts, "to") or not getattr(parts, "shape", None):
        raise ModelError(f"share: a batch holds {type(parts).__name__}; tensors are needed, with a row a sample")
    return int(parts.shape[0])


def _slice_rows(batch: Any, rows: slice, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {key: _slice_rows(part, rows, device) for key, part in batch.items()}
    if isinstance(batch, list | tuple):
        parts = [_slice_rows(part, rows, device) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch[rows].to(device)
