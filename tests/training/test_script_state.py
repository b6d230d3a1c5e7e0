"""State of a user's optimizer and scheduler: captured from every kind that torch has, and restored into fresh ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.reshard import reshard_state
from raytrain_hpc.training.script_state import ScriptState

NO_GENERATORS = torch.zeros(1, dtype=torch.uint8)
Script = tuple[nn.Module, torch.optim.Optimizer, Any]


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


def make_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> ScriptState:
    return ScriptState({"": model}, {"": optimizer}, {} if scheduler is None else {"scheduler": scheduler})


def make_script(optimizer: str, scheduler: str, seed: int) -> Script:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    created = OPTIMIZERS[optimizer](model.parameters())
    return model, created, SCHEDULERS[scheduler](created)


def train(script: Script, first: int, stop: int) -> list[float]:
    model, optimizer, scheduler = script
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
def test_capture_changes_no_loss_and_restore_continues_the_curve(optimizer: str, scheduler: str) -> None:
    expected = train(make_script(optimizer, scheduler, 0), 0, 12)
    first = make_script(optimizer, scheduler, 0)
    state = make_state(*first)
    assert train(first, 0, 5) == expected[:5]
    state.capture()
    second = make_script(optimizer, scheduler, 1)  # other weights
    restored = make_state(*second)
    reshard_state(
        restored.to_sharded_state(NO_GENERATORS), state.to_sharded_state(NO_GENERATORS), None, torch.device("cpu")
    )
    restored.restore()
    assert restored.lr == state.lr
    assert train(second, 5, 12) == expected[5:]


def test_many_parameters_fit_and_a_checkpoint_of_an_earlier_version_is_read() -> None:
    def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        parameters = {f"a_rather_long_name_of_a_module_{i:05d}": nn.Parameter(torch.zeros(1)) for i in range(6000)}
        model = nn.ParameterDict(parameters)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None

    first, second = make_parts(), make_parts()
    state, restored = make_state(*first), make_state(*second)
    used = [parameter for index, parameter in enumerate(first[0].parameters()) if index % 3]
    for parameter in used:
        parameter.grad = torch.ones(1)
    first[1].step()
    state.capture()
    states = [one.to_sharded_state(NO_GENERATORS) for one in (restored, state)]
    reshard_state(*states, None, torch.device("cpu"))
    plain = json.loads(bytes(states[0].get_shard("plain", 0).tensor.numpy()).rstrip(b"\0"))
    assert plain["optimizers"][""]["states"] == {}
    restored.restore()
    assert [bool(second[1].state.get(parameter)) for parameter in second[0].parameters()] == [
        bool(index % 3) for index in range(6000)
    ]
    del plain["optimizers"][""]["has_state"]
    plain["optimizers"][""]["states"] = {"a_rather_long_name_of_a_module_00004": {}}
    text = json.dumps(plain).encode()
    states[0].get_shard("plain", 0).tensor.zero_()[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    second[1].state.clear()
    restored.restore()
    assert len(second[1].state) == 1


def test_state_beyond_the_capacity_is_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"attach: \d+ bytes of non-tensor state, \d+ of them of objects history; the limit is .*state_dict"
    with pytest.raises(ModelError, match=message):
        ScriptState({"": model}, {"": optimizer}, {"history": Average({"losses": [0.25] * 60000}), "n": Average({})})


def test_optimizer_of_another_model_is_rejected() -> None:
    model, other_model = nn.Linear(2, 1), nn.Linear(2, 1)
    with pytest.raises(ModelError, match="a parameter that the model does not have"):
        make_state(model, torch.optim.SGD(other_model.parameters(), lr=0.1), None)


def test_parameter_whose_first_gradient_comes_late() -> None:
    """Its optimizer state starts with its first gradient, also after a restore."""

    def train_steps(script: tuple[nn.Module, torch.optim.Optimizer], steps: range) -> list[float]:
        model, optimizer = script
        losses = []
        for step in steps:
            x = torch.randn(4, 2, generator=torch.Generator().manual_seed(step))
            loss = (model["used"](x) + (model["late"](x) if step > 6 else 0.0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def make_parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"used": nn.Linear(2, 1), "late": nn.Linear(2, 1)})
        return model, torch.optim.NAdam(model.parameters(), lr=0.01)

    expected = train_steps(make_parts(0), range(10))
    first, second = make_parts(0), make_parts(1)
    state = make_state(*first, None)
    assert train_steps(first, range(5)) == expected[:5]
    state.capture()
    restored = make_state(*second, None)
    reshard_state(
        restored.to_sharded_state(NO_GENERATORS), state.to_sharded_state(NO_GENERATORS), None, torch.device("cpu")
    )
    restored.restore()
    assert train_steps(second, range(5, 10)) == expected[5:]


def test_optimizer_with_plain_numbers_and_replaced_tensors() -> None:
    class Odd(torch.optim.Optimizer):
        """Keeps a plain number as state, and replaces its tensor in every step."""

        def __init__(self, parameters: Any):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(parameter)) + parameter.grad
                parameter -= 0.1 / state["steps"] * state["mean"]

    def make_parts(seed: int) -> Script:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
        return model, Odd(model.parameters()), None

    expected = train(make_parts(0), 0, 8)
    first, second = make_parts(0), make_parts(1)
    script_state = make_state(*first)
    for step in range(4):
        train(first, step, step + 1)
        script_state.capture()
    restored = make_state(*second)
    reshard_state(
        restored.to_sharded_state(NO_GENERATORS),
        script_state.to_sharded_state(NO_GENERATORS),
        None,
        torch.device("cpu"),
    )
    restored.restore()
    assert train(second, 4, 8) == expected[4:]


def test_unsupported_optimizer_is_named_in_the_error() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ModelError, match="attach: LBFGS is not supported"):
        make_state(model, torch.optim.LBFGS(model.parameters()), None)


def test_frozen_parameters_have_no_optimizer_state() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    names = {shard.name for shard in make_state(model, optimizer, None).to_sharded_state(NO_GENERATORS)}
    assert "model.0.weight" in names and not any(name.startswith("optimizer.exp_avg.0.") for name in names)


class Average:
    """An average of weights, kept as tensors outside of a module."""

    def __init__(self, state: dict[str, Any]):
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("array", [torch.zeros(4, 2), np.zeros((4, 2))])
def test_tensors_of_an_object_are_refused_by_name(array: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    message = r"attach: ema: state_dict\(\)\['avg'\]\[1\] is a tensor or array of shape \[4, 2\].*further model"
    ema = Average({"avg": [torch.zeros(1), array]})
    with pytest.raises(ModelError, match=message):
        ScriptState({"": model}, {"": optimizer}, {"ema": ema})
    late = Average({"number": np.int64(3), "one": torch.ones(1), "function": len})
    state = ScriptState({"": model}, {"": optimizer}, {"late": late})
    with pytest.raises(ModelError, match=message):
        state.add_object("ema", ema, is_resumed=False)
    late.state = {"number": 4}
    state.restore()
    assert late.state["number"] == 3 and late.state["one"] == 1
    late.state = {0: torch.zeros(3)}
    with pytest.raises(ModelError, match=r"attach: late: state_dict\(\)\[0\] is a tensor"):
        state.capture()


def test_a_further_model_keeps_averaged_weights() -> None:
    """What the message for tensors of an object recommends."""

    def make_parts() -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
        model = nn.Linear(2, 1)
        average = torch.optim.swa_utils.AveragedModel(model)
        return {"model": model, "ema": average}, torch.optim.SGD(model.parameters(), lr=0.1)

    models, optimizer = make_parts()
    state = ScriptState(models, {"": optimizer}, {})
    models["ema"].update_parameters(models["model"])  # type: ignore[operator]
    others, other_optimizer = make_parts()
    restored = ScriptState(others, {"": other_optimizer}, {})
    states = [one.to_sharded_state(NO_GENERATORS) for one in (restored, state)]
    reshard_state(*states, None, torch.device("cpu"))
    assert int(others["ema"].n_averaged) == 1  # type: ignore[arg-type]
    assert torch.equal(others["ema"].module.weight, models["model"].weight)  # type: ignore[union-attr,arg-type]
