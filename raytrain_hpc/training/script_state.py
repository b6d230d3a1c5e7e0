"""State of a user's model, optimizer and scheduler, as shards that can be snapshotted, saved and restored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

_PLAIN_VALUES_BYTES = 1 << 18  # capacity for non-tensor state: of parameter groups, of parameters, of the scheduler
_OMITTED = object()


class ScriptState:
    """State of a model, optimizer and scheduler as named tensors, whole on every rank.

    Non-tensor values are stored as JSON in a byte tensor. An optimizer allocates its tensors in its first step. It
    therefore takes one step whose effects are undone, so that the state has the same tensors from the beginning.

    Raises ModelError if the optimizer has a parameter that the model does not have, or if such a step fails.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any):
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        names = {parameter: name for name, parameter in self.parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in names:
                    raise ModelError("attach: the optimizer has a parameter that the model does not have")
        # State before any step, on the device of its parameter: the model may have been moved since.
        self._initial_optimizer_state = {
            parameter: _copy_state(state, parameter) for parameter, state in optimizer.state.items()
        }
        try:
            self._init_optimizer_state()
        except Exception as error:  # an optimizer may raise any type
            kind = type(optimizer).__name__
            raise ModelError(f"attach: {kind} is not supported: a step with zero gradients fails ({error})") from error
        self._plain_values = torch.zeros(_PLAIN_VALUES_BYTES, dtype=torch.uint8)
        self._capture_plain_values()

    def _init_optimizer_state(self) -> None:
        """Take one step with zero gradients, undo its effects and keep the tensors that it allocated."""
        self._reset_optimizer()
        weights = [parameter.detach().clone() for parameter in self.parameters.values()]
        settings = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, weight in zip(self.parameters.values(), weights, strict=True):
                parameter.copy_(weight)
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
        """Restore the optimizer state from before any step."""
        self._optimizer.state.clear()
        self._optimizer.state.update(
            {parameter: _copy_state(state, parameter) for parameter, state in self._initial_optimizer_state.items()}
        )

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def model_tensors(self) -> Iterator[Tensor]:
        """Yield the parameters and buffers of the model."""
        yield from (parameter.detach() for parameter in self._model.parameters())
        yield from self._model.buffers()

    def to_sharded_state(self) -> ShardedState:
        """Return the whole state."""
        shards = [StateShard.from_tensor(f"model.{name}", parameter) for name, parameter in self.parameters.items()]
        buffers = dict(self._model.named_buffers())
        shards += [
            StateShard.from_tensor(f"model.{name}", buffers[name])
            for name in self._model.state_dict()
            if name in buffers
        ]
        shards += [
            StateShard.from_tensor(f"optimizer.{key}.{name}", value) for _, name, key, value in self._optimizer_tensors
        ]
        return ShardedState([*shards, StateShard.from_tensor("plain", self._plain_values)])

    def capture(self) -> None:
        """Update the state. Call after each step: an optimizer may have replaced tensors by new ones."""
        for parameter, _, key, tensor in self._optimizer_tensors:
            state = self._optimizer.state.get(parameter, {})
            if key in state and state[key] is not tensor:
                state[key] = tensor.copy_(state[key])
        self._capture_plain_values()

    def _capture_plain_values(self) -> None:
        """Store the non-tensor values. Raises ModelError if they exceed the capacity."""
        states = {name: self._optimizer.state.get(parameter) for name, parameter in self.parameters.items()}
        values = {
            "groups": [
                _to_plain({key: value for key, value in group.items() if key != "params"})
                for group in self._optimizer.param_groups
            ],
            # The optimizer has no state yet for parameters that were never updated.
            "states": {
                name: _to_plain({key: entry for key, entry in state.items() if not isinstance(entry, Tensor)})
                for name, state in states.items()
                if state
            },
            "scheduler": None if self._scheduler is None else _to_plain(self._scheduler.state_dict()),
        }
        text = json.dumps(values).encode()
        if len(text) > _PLAIN_VALUES_BYTES:
            raise ModelError(f"attach: {len(text)} bytes of non-tensor state; the limit is {_PLAIN_VALUES_BYTES} bytes")
        self._plain_values.zero_()
        self._plain_values[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def restore(self) -> None:
        """Load the state into optimizer and scheduler. Call after its tensors have been filled."""
        saved = json.loads(bytes(self._plain_values.numpy()).rstrip(b"\0").decode())
        for group, saved_group in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            for key, value in saved_group.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = _merge(group.get(key), value)
        for name, entries in saved["states"].items():
            self._optimizer.state[self.parameters[name]].update(entries)
        for parameter, name, key, tensor in self._optimizer_tensors:
            if name in saved["states"]:
                self._optimizer.state[parameter][key] = tensor
        if self._scheduler is not None:
            self._scheduler.load_state_dict(_merge(self._scheduler.state_dict(), saved["scheduler"]))


def _copy_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Copy the state of a parameter; tensors of the parameter's shape go to its device."""
    return {
        key: value.detach().to(parameter.device if value.shape == parameter.shape else value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def _to_plain(value: Any) -> Any:
    """Convert numbers, strings, lists and string-keyed dicts to JSON values; return _OMITTED for other types."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        values = [_to_plain(item) for item in value]
        return _OMITTED if any(item is _OMITTED for item in values) else values
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):  # JSON keys are strings
            return _OMITTED
        items = {key: _to_plain(item) for key, item in value.items()}
        return {key: item for key, item in items.items() if item is not _OMITTED}
    return value if isinstance(value, int | float | str | bool | None) else _OMITTED


def _merge(current: Any, saved: Any) -> Any:
    """Merge saved values into current ones: types are those of `current`, and omitted entries keep its values."""
    if isinstance(current, Tensor):
        return current.new_tensor(saved)
    if isinstance(current, dict) and isinstance(saved, dict):
        return {**current, **{key: _merge(current.get(key), value) for key, value in saved.items()}}
    if isinstance(current, list | tuple) and isinstance(saved, list):
        padded = [*current, *[None] * (len(saved) - len(current))]
        return type(current)(
            _merge(current_item, saved_item) for current_item, saved_item in zip(padded, saved, strict=False)
        )
    return saved
