"""The state of a user's own model, optimizer and scheduler, as slices that can be kept, saved and filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

_PLAIN_VALUES_BYTES = 1 << 18  # for what is no tensor: numbers of parameter groups, of the scheduler, of each parameter
_OMITTED = object()


class ScriptState:
    """Every tensor of them by a name of its own; every rank holds all. Plain numbers go along as JSON in a tensor.

    An optimizer makes its tensors in its first step: it is given one that leaves no trace, so that the state has one
    shape from the beginning. Raises ModelError for parameters that the optimizer has and the model has not, and for an
    optimizer that cannot take such a step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any):
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        names = {parameter: name for name, parameter in self.parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise ModelError("attach: the optimizer has a parameter that is none of the model's")
        # What it had before any step, beside the parameters: these may have been moved to another device since.
        self._initial_optimizer_state = {
            parameter: _copy_state(state, parameter) for parameter, state in optimizer.state.items()
        }
        try:
            self._init_optimizer_state()
        except Exception as error:  # whatever such an optimizer raises
            kind = type(optimizer).__name__
            raise ModelError(f"attach: {kind} cannot be kept: a step without gradients fails ({error})") from error
        self._plain_values = torch.zeros(_PLAIN_VALUES_BYTES, dtype=torch.uint8)
        self._capture_plain_values()

    def _init_optimizer_state(self) -> None:
        """One step with zero gradients, of which nothing stays but what tensors there are."""
        self._reset_optimizer()
        weights = [parameter.detach().clone() for parameter in self.parameters.values()]
        settings = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, before in zip(self.parameters.values(), weights, strict=True):
                parameter.copy_(before)
        for group, setting in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self._optimizer_tensors = [
            (parameter, name, key, value.clone())
            for name, parameter in self.parameters.items()
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        self._reset_optimizer()

    def _reset_optimizer(self) -> None:
        """The optimizer has seen nothing, and begins as it likes to."""
        self._optimizer.state.clear()
        self._optimizer.state.update(
            {parameter: _copy_state(state, parameter) for parameter, state in self._initial_optimizer_state.items()}
        )

    @property
    def lr(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def model_tensors(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        yield from (parameter.detach() for parameter in self._model.parameters())
        yield from self._model.buffers()

    def to_sharded_state(self) -> ShardedState:
        """All of it."""
        held = [StateShard.from_tensor(f"model.{name}", parameter) for name, parameter in self.parameters.items()]
        buffers = dict(self._model.named_buffers())
        held += [
            StateShard.from_tensor(f"model.{name}", buffers[name])
            for name in self._model.state_dict()
            if name in buffers
        ]
        held += [
            StateShard.from_tensor(f"optimizer.{key}.{name}", value) for _, name, key, value in self._optimizer_tensors
        ]
        return ShardedState([*held, StateShard.from_tensor("plain", self._plain_values)])

    def capture(self) -> None:
        """A step was taken: what the optimizer has made or put in another's place goes where it is held."""
        for parameter, _, key, held in self._optimizer_tensors:
            state = self._optimizer.state.get(parameter, {})
            if key in state and state[key] is not held:
                state[key] = held.copy_(state[key])
        self._capture_plain_values()

    def _capture_plain_values(self) -> None:
        """Note plain numbers down. ModelError where they are too many."""
        states = {name: self._optimizer.state.get(parameter) for name, parameter in self.parameters.items()}
        said = {
            "groups": [
                _to_plain({key: value for key, value in group.items() if key != "params"})
                for group in self._optimizer.param_groups
            ],
            # Of parameters that were stepped; others the optimizer has still to begin with.
            "states": {
                name: _to_plain({key: one for key, one in state.items() if not isinstance(one, Tensor)})
                for name, state in states.items()
                if state
            },
            "scheduler": None if self._scheduler is None else _to_plain(self._scheduler.state_dict()),
        }
        text = json.dumps(said).encode()
        if len(text) > _PLAIN_VALUES_BYTES:
            raise ModelError(f"attach: {len(text)} bytes of plain numbers to keep; {_PLAIN_VALUES_BYTES} fit")
        self._plain_values.zero_()
        self._plain_values[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def restore(self) -> None:
        """What is held has been filled: give it to the optimizer and the scheduler."""
        said = json.loads(bytes(self._plain_values.numpy()).rstrip(b"\0").decode())
        for group, before in zip(self._optimizer.param_groups, said["groups"], strict=True):
            for key, value in before.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = _merge(group.get(key), value)
        for name, plain in said["states"].items():
            self._optimizer.state[self.parameters[name]].update(plain)
        for parameter, name, key, held in self._optimizer_tensors:
            if name in said["states"]:
                self._optimizer.state[parameter][key] = held
        if self._scheduler is not None:
            self._scheduler.load_state_dict(_merge(self._scheduler.state_dict(), said["scheduler"]))


def _copy_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A copy; tensors as large as the parameter are where it is."""
    return {
        key: value.detach().to(parameter.device if value.shape == parameter.shape else value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def _to_plain(value: Any) -> Any:
    """What of a value is numbers and words, in lists and by names, as JSON; _LEFT_OUT where nothing is."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        plain = [_to_plain(one) for one in value]
        return _OMITTED if any(one is _OMITTED for one in plain) else plain
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):  # JSON has no other keys
            return _OMITTED
        plain_ones = {key: _to_plain(one) for key, one in value.items()}
        return {key: one for key, one in plain_ones.items() if one is not _OMITTED}
    return value if isinstance(value, int | float | str | bool | None) else _OMITTED


def _merge(current: Any, saved: Any) -> Any:
    """`said` in the place of what is fresh, of whose kind it becomes; what was left out stays as it is fresh."""
    if isinstance(current, Tensor):
        return current.new_tensor(saved)
    if isinstance(current, dict) and isinstance(saved, dict):
        return {**current, **{key: _merge(current.get(key), value) for key, value in saved.items()}}
    if isinstance(current, list | tuple) and isinstance(saved, list):
        padded = [*current, *[None] * (len(saved) - len(current))]
        return type(current)(_merge(old, new) for old, new in zip(padded, saved, strict=False))
    return saved
