"""A user's optimizer and scheduler as state: every kind that torch has, taken down and given to fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.holding import copy_pieces
from raytrain_hpc.worker.owned import Owned

Made = tuple[nn.Module, torch.optim.Optimizer, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
}


def made(optimizer: str, scheduler: str, seed: int) -> Made:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    chosen = OPTIMIZERS[optimizer](model.parameters())
    return model, chosen, SCHEDULERS[scheduler](chosen)


def train(parts: Made, first: int, stop: int) -> list[float]:
    model, optimizer, scheduler = parts
    losses = []
    for step in range(first, stop):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(loss.item())
        elif scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_taking_charge_changes_nothing_and_another_goes_on(optimizer: str, scheduler: str) -> None:
    plain = train(made(optimizer, scheduler, 0), 0, 12)
    first = made(optimizer, scheduler, 0)
    mine = Owned(*first)
    assert train(first, 0, 5) == plain[:5]
    mine.changed()
    second = made(optimizer, scheduler, 1)  # other weights
    theirs = Owned(*second)
    copy_pieces(mine.holding(), theirs.holding())
    theirs.loaded()
    assert theirs.rate == mine.rate
    assert train(second, 5, 12) == plain[5:]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(ModelError, match="none of the model's"):
        Owned(model, torch.optim.SGD(other.parameters(), lr=0.1), None)


def test_frozen_parameters_stay_out_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = {held.name for held in Owned(model, optimizer, None).holding()}
    assert "model.0.weight" in names and not any(name.startswith("optimizer.exp_avg.0.") for name in names)
