"""Elastic training of an existing PyTorch script: five added lines, started with `raytrain-hpc run SCRIPT`.

    import raytrain_hpc as rt
    run = rt.attach(model, optimizer)
    for step in run.steps(1000):
        inputs, targets = run.local_batch(batch(step))
        loss = run.backward(loss)

Started with plain `python`, the same script trains in one process as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from raytrain_hpc.errors import ModelError
from raytrain_hpc.runtime.script_context import CURRENT_RANK
from raytrain_hpc.script_loader import FunctionLoader, ScriptLoader

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from raytrain_hpc.runtime.script_context import ScriptRank

Batch = TypeVar("Batch")


class ScriptRun:
    """Handle of a training script to its run, returned by `attach`. Without a run, it represents a single process."""

    def __init__(self, rank: ScriptRank | None, models: Mapping[str, nn.Module]):
        self._rank, self._models, self._num_loaders, self._loss = rank, models, 0, 0.0

    @property
    def device(self) -> torch.device:
        """The rank's device; without a run, the CPU."""
        import torch

        return torch.device("cpu") if self._rank is None else self._rank.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, the one that should print and write files."""
        return self._rank is None or self._rank.rank == 0

    @property
    def world_size(self) -> int:
        """Number of ranks; 1 without a run."""
        return 1 if self._rank is None else self._rank.world_size

    @property
    def loss(self) -> float:
        """Mean loss over the global batch in the current step, the `train/loss` of its record.

        Summed over the calls of `backward`, and over loops over `microbatches` that are complete.
        """
        return self._loss if self._rank is None else self._rank.loss

    def steps(self, count: int | None = None) -> Iterator[int]:
        """Yield the numbers of the remaining steps, starting at 0 in a new run. `count` must equal train.steps.

        A step is committed when the next one is requested: recovery restores models, optimizers, other objects and the
        generators of torch, NumPy and `random` as of that moment. A rank may take minutes outside of `backward` and of
        loops over `microbatches`; the others wait for it. All ranks continue with the generators of rank 0, so that
        they draw the same batches; forward passes of the models draw from a stream of their own.
        """
        if self._rank is not None:
            yield from self._rank.steps(count)
            return
        if count is None:
            raise ModelError("steps: count is missing; without a run there is no train.steps to take it from")
        for step in range(count):
            self._loss = 0.0
            yield step

    def loader(self, source: Any) -> Iterator[Any]:
        """Return an endless iterator over the batches of a torch DataLoader, or of a function that draws a batch.

        A recovered run continues with the next batch. DataLoader: its batches, epoch after epoch, in the order of a
        single process; each rank reads only its rows, on its device. Function: whole batches, the same on all ranks;
        take the rows with `local_batch`. A batch may be drawn before the loop, and each next one a step ahead.
        """
        loader = FunctionLoader(source, self._rank) if callable(source) else ScriptLoader(source, self._rank)
        if self._rank is not None:
            self._rank.add_object(f"loader {self._num_loaders}", loader)
        self._num_loaders += 1
        return loader

    def local_batch(self, batch: Batch) -> Batch:
        """Return this rank's rows of a global batch, on its device. Call before the forward pass of these rows.

        All ranks must pass the same batch: a tensor with one sample per row, or a tuple, list or mapping of such
        tensors. A mapping is returned as a dict.
        """
        if self._rank is None:
            return batch
        local_rows = self._rank.get_local_rows(_count_rows(batch))
        local_batch: Batch = _slice_rows(batch, slice(local_rows.start, local_rows.stop), self._rank.device)
        return local_batch

    def backward(self, loss: Tensor) -> Tensor:
        """Compute gradients and return the mean loss over the global batch. Call in place of `loss.backward()`.

        `loss` is the mean over this rank's rows, or a term of it. The gradients are those of the mean over all rows,
        and are added to earlier ones. It may be called several times per step, for gradient accumulation or several
        losses; the step's train/loss is the sum. Gradients accumulated over several steps are not part of the saved
        state: recovery starts without them.
        """
        if self._rank is not None:
            return self._rank.backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._loss += float(loss.detach())
        return loss.detach()

    def microbatches(self, batch: Batch) -> Iterator[Batch]:
        """Yield parts of `train.micro_batch_size` rows of this rank's rows. Call `backward` once for each.

        `batch`: what `local_batch` or `loader` has returned. `backward` then takes the mean loss over the rows of the
        part and returns it; after the loop, the gradients are those of the mean over the global batch. With
        `train.deterministic=elastic` they are added in a fixed order, and the generators of torch, NumPy and `random`
        are seeded for each microbatch: any number of ranks computes the same bits. Without a run, yields the batch.
        """
        if self._rank is None:
            yield batch
            return
        for rows in self._rank.iter_microbatches(_count_rows(batch)):
            microbatch: Batch = _slice_rows(batch, rows, self._rank.device, copy=True)
            yield microbatch

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale the gradients of `parameters` so that their norm is at most `max_norm`. Return the norm before.

        Like `torch.nn.utils.clip_grad_norm_`, but with the same bits on any number of ranks with
        `train.deterministic=elastic`, under ZeRO too.
        """
        if self._rank is not None:
            return self._rank.clip_grad_norm(parameters, max_norm)
        import torch

        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to this step's line in metrics.jsonl. Call on all ranks or on the main process."""
        if self._rank is not None:
            self._rank.log(metrics)

    def evaluate(self, batches: Iterable[Any], loss: Callable[[Any], Any], name: str = "") -> float:
        """Return the mean loss over all batches, which are divided among the ranks, and record it as `val/loss`.

        Models are in evaluation mode, without gradients; random generators keep their state. All ranks must pass the
        same batches. Callbacks for evaluations are called. Before the first optimizer step of a step, and after
        the loop, the result belongs to the last committed one, after it to this one; that of step 0 is printed only.

        Args:
            batches: A torch DataLoader, of which each rank reads only its batches, or other batches.
            loss: `loss(batch)` returns the mean loss over the rows of a batch, or (sum, count).
            name: Of the validation set, if there are several: recorded as `val/NAME/loss`.
        """
        from raytrain_hpc.observability.metrics import get_eval_key
        from raytrain_hpc.training.script_evaluation import evaluate

        if self._rank is None:
            return evaluate(self._models, batches, loss, _count_rows, None)
        with self._rank.evaluation() as metrics:
            value = evaluate(self._models, batches, loss, _count_rows, self._rank)
            metrics[get_eval_key(name)] = value
        return value

    def save(self) -> None:
        """Request a checkpoint of this step, in addition to those of checkpoint.interval."""
        if self._rank is not None:
            self._rank.save()


def attach(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    scheduler: Any = None,
    *,
    plan: Mapping[str, str] | None = None,
    **objects: Any,
) -> ScriptRun:
    """Register models, optimizers and other objects with the run of this script, if there is one.

    Models are sharded as parallel.zero says, in place, and optimizers are given the sharded parameters: attach them
    before their first step. In a resumed or recovered run, their state is restored.

    Args:
        model: A module, or several by name, such as a generator and a discriminator.
        optimizer: An optimizer, or several by name.
        scheduler: A learning-rate scheduler, or another object with `state_dict` and `load_state_dict`.
        plan: Blocks of the models, as of `train`: the units of sharding.
        objects: Further objects whose `state_dict` consists of plain numbers, text, lists and dicts, such as a
            gradient scaler. Tensors belong in a module that is given as one of several models.
    """
    rank = CURRENT_RANK.get()
    models = {"": model} if not isinstance(model, Mapping) else model
    if rank is not None:
        optimizers = {"": optimizer} if not isinstance(optimizer, Mapping) else optimizer
        named = objects if scheduler is None else {"scheduler": scheduler, **objects}
        rank.attach(models, optimizers, named, plan)
    return ScriptRun(rank, models)


def _count_rows(batch: Any) -> int:
    items = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(items, list | tuple):
        sizes = {_count_rows(item) for item in items}
        if len(sizes) != 1:
            raise ModelError(f"batch: tensors have {sorted(sizes)} rows; all need the same number")
        return sizes.pop()
    if not hasattr(items, "to") or not getattr(items, "shape", None):
        raise ModelError(f"batch: it holds {type(items).__name__}; pass tensors with one row per sample")
    return int(items.shape[0])


def _slice_rows(batch: Any, rows: slice, device: torch.device, *, copy: bool = False) -> Any:
    """Return rows of nested tensors. `copy`: as tensors of their own. Kernels may sum in an order that depends on the
    alignment in memory, and that of a view depends on the rows before it.
    """
    if isinstance(batch, Mapping):
        return {key: _slice_rows(item, rows, device, copy=copy) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        items = [_slice_rows(item, rows, device, copy=copy) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch[rows].to(device, copy=copy)
