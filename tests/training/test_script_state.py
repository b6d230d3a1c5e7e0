"""A user's optimizer and scheduler as state: every kind that torch has, taken down and given to fresh ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.sharded_state import copy_overlap
from raytrain_hpc.training.script_state import ScriptState

Made = tuple[nn.Module, torch.optim.Optimizer, Any]


def _two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": parameters[:2], "lr": 0.05}, {"params": parameters[2:], "weight_decay": 0.0}])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adamw, lr a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "two groups": lambda p: _two_groups(list(p)),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda optimizer: None,
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], 0.5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, 12, cycle_momentum=False),
    "a callable": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, partial(pow, 0.9)),
    "warmup, then cosine": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        [4],
    ),
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
    mine = ScriptState(*first)
    assert train(first, 0, 5) == plain[:5]
    mine.capture()
    second = made(optimizer, scheduler, 1)  # other weights
    theirs = ScriptState(*second)
    copy_overlap(mine.to_sharded_state(), theirs.to_sharded_state())
    theirs.restore()
    assert theirs.lr == mine.lr
    assert train(second, 5, 12) == plain[5:]


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(ModelError, match="none of the model's"):
        ScriptState(model, torch.optim.SGD(other.parameters(), lr=0.1), None)


def test_a_parameter_that_is_reached_late() -> None:
    """Its state begins when its first gradient comes, also in whoever goes on."""

    def both(parts: tuple[nn.Module, torch.optim.Optimizer], steps: range) -> list[float]:
        model, optimizer = parts
        losses = []
        for step in steps:
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            loss = (model["used"](x) + (model["late"](x) if step > 6 else 0.0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "late": nn.Linear(2, 1)})
        return model, torch.optim.NAdam(model.parameters(), lr=0.01)

    plain = both(parts(0), range(10))
    first, second = parts(0), parts(1)
    mine = ScriptState(*first, None)
    assert both(first, range(5)) == plain[:5]
    mine.capture()
    theirs = ScriptState(*second, None)
    copy_overlap(mine.to_sharded_state(), theirs.to_sharded_state())
    theirs.restore()
    assert both(second, range(5, 10)) == plain[5:]


def test_state_that_is_no_tensor_and_state_that_is_replaced() -> None:
    class Odd(torch.optim.Optimizer):
        """Counts in a number, and makes a new tensor in every step."""

        def __init__(self, parameters: Any):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter -= 0.1 / state["steps"] * state["mean"]

    def parts(seed: int) -> Made:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        return model, Odd(model.parameters()), None

    plain = train(parts(0), 0, 8)
    first, second = parts(0), parts(1)
    mine = ScriptState(*first)
    for step in range(4):
        train(first, step, step + 1)
        mine.capture()
    theirs = ScriptState(*second)
    copy_overlap(mine.to_sharded_state(), theirs.to_sharded_state())
    theirs.restore()
    assert train(second, 4, 8) == plain[4:]


def test_an_optimizer_that_takes_no_such_step_is_named() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ModelError, match="attach: LBFGS cannot be kept"):
        ScriptState(model, torch.optim.LBFGS(model.parameters()), None)


def test_frozen_parameters_stay_out_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = {held.name for held in ScriptState(model, optimizer, None).to_sharded_state()}
    assert "model.0.weight" in names and not any(name.startswith("optimizer.exp_avg.0.") for name in names)
