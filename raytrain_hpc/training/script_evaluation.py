"""Evaluation in a script: the mean loss over batches that are divided among the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.runtime.script_context import ScriptRank
from raytrain_hpc.training.script_random import keep_generators


def evaluate(
    models: Mapping[str, nn.Module],
    batches: Iterable[Any],
    loss: Callable[[Any], Any],
    count_rows: Callable[[Any], int],
    rank: ScriptRank | None,
) -> float:
    """Return the mean of `loss` over all batches, the same on all ranks and with the same bits on any number of them.

    Every rank runs the same number of passes, because forward passes can contain collectives. Random generators keep
    their state. Raises ModelError without batches, and for losses that are no numbers.
    """
    number, world_size = (0, 1) if rank is None else (rank.rank, rank.world_size)
    sums: list[tuple[float, float]] = []  # of the losses of a batch, and their count, in every round
    device = torch.device("cpu") if rank is None else rank.device
    with _eval_mode(models), keep_generators(device), torch.no_grad():
        for item, is_counted in _deal(batches, number, world_size):
            if rank is not None:
                rank.count_progress()
            batch = item if rank is None else rank.move_to_device(item)
            total, count = _check_loss(loss(batch), batch, count_rows)
            sums.append((total, count) if is_counted else (0.0, 0.0))
    table = torch.zeros(len(sums) * world_size, 2, dtype=torch.float64)
    if sums:
        table[number::world_size] = torch.tensor(sums, dtype=torch.float64)
    if rank is not None:
        table = table.to(rank.device)
        rank.all_reduce(table)
    total, count = sum_pairwise(table).tolist()
    if not count:
        raise ModelError("evaluate: there is no batch; pass a DataLoader or a list of batches")
    return float(total / count)


def _deal(batches: Iterable[Any], number: int, world_size: int) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batch of every round, and whether it counts: in the last round, the last one is repeated.

    Of a DataLoader of a map-style dataset, only this rank's batches are read.
    """
    sampler = getattr(batches, "batch_sampler", None)
    is_map_style = sampler is not None and hasattr(getattr(batches, "dataset", None), "__getitem__")
    items = iter(sampler if sampler is not None and is_map_style else batches)
    while round_items := list(islice(items, world_size)):
        item = round_items[min(number, len(round_items) - 1)]
        loader: Any = batches
        batch = loader.collate_fn([loader.dataset[index] for index in item]) if is_map_style else item
        yield batch, number < len(round_items)


def _check_loss(value: Any, batch: Any, count_rows: Callable[[Any], int]) -> tuple[float, float]:
    """Return the sum of the losses of a batch, and their count: its rows unless the function returned (sum, count)."""
    total, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    for number in (total, 0.0 if count is None else count):
        if not isinstance(number, int | float) and getattr(number, "numel", lambda: 0)() != 1:
            raise ModelError("evaluate: return the mean loss of a batch, or (sum, count), as scalars")
    if count is not None:
        return float(total), float(count)
    num_rows = count_rows(batch)
    return float(total) * num_rows, float(num_rows)


@contextmanager
def _eval_mode(models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Set modules to evaluation inside the context; restore the mode of each of their parts afterwards."""
    modes = [(module, module.training) for model in models.values() for module in model.modules()]
    for model in models.values():
        model.eval()
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
