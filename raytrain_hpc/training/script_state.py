"""State of a user's models, optimizers and other objects, as shards that can be snapshotted, saved and restored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.training.script_models import name_parameters
from raytrain_hpc.training.state_loader import GENERATORS

_PLAIN_VALUES_BYTES = 1 << 18  # capacity for non-tensor state: of parameter groups, of parameters, of the scheduler
_OMITTED = object()


class ScriptState:
    """State of models, optimizers and other objects as named tensors, sharded where their parameters are.

    Non-tensor values are stored as JSON in a byte tensor. An optimizer allocates its tensors in its first step. It
    therefore takes one step whose effects are undone, so that the state has the same tensors from the beginning.
    `models`, `optimizers`: by name; "" for one without a name. `objects`: anything with `state_dict`.

    Raises ModelError if an optimizer has a parameter that no model has, if such a step fails, or if an object has a
    tensor.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        objects: Mapping[str, Any],
    ):
        self._models, self._optimizers, self.objects = models, optimizers, dict(objects)
        self.parameters = name_parameters(models)
        self._sorted_names = sorted(self.parameters)
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in optimizers.values():
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter not in names:
                    raise ModelError("attach: the optimizer has a parameter that the model does not have")
        self._restored_objects: dict[str, Any] = {}
        self._optimizer_tensors: list[tuple[str, nn.Parameter, str, str, Tensor]] = []
        for key, optimizer in optimizers.items():
            try:
                self._init_optimizer_state(key, optimizer)
            except Exception as error:  # an optimizer may raise any type
                kind = type(optimizer).__name__
                raise ModelError(
                    f"attach: {kind} is not supported: a step with zero gradients fails ({error})"
                ) from error
        self._plain_values = torch.zeros(_PLAIN_VALUES_BYTES, dtype=torch.uint8)
        self._capture_plain_values()

    def _init_optimizer_state(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        """Take one step with zero gradients, undo its effects and keep the tensors that it allocated."""
        # State before any step, on the device of its parameter: the model may have been moved since.
        initial_state = {parameter: _copy_state(state, parameter) for parameter, state in optimizer.state.items()}
        _reset_optimizer(optimizer, initial_state)
        weights = [parameter.detach().clone() for parameter in self.parameters.values()]
        settings = [{k: value for k, value in group.items() if k != "params"} for group in optimizer.param_groups]
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        with torch.no_grad():
            for parameter, weight in zip(self.parameters.values(), weights, strict=True):
                parameter.copy_(weight)
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self._optimizer_tensors += [
            (key, parameter, name, entry, value.clone())
            for name, parameter in self.parameters.items()
            for entry, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        _reset_optimizer(optimizer, initial_state)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group of the first optimizer."""
        return float(next(iter(self._optimizers.values())).param_groups[0]["lr"])

    def to_sharded_state(self, generators: Tensor, callback_shards: Iterable[StateShard] = ()) -> ShardedState:
        """Return this rank's part of the state. `generators`: the states of random generators."""
        shards = [StateShard.from_tensor(f"model.{name}", parameter) for name, parameter in self.parameters.items()]
        for key, model in self._models.items():
            buffers, prefix = dict(model.named_buffers()), _prefix(key)
            shards += [
                StateShard.from_tensor(f"model.{prefix}{name}", buffers[name])
                for name in model.state_dict()
                if name in buffers
            ]
        shards += [
            StateShard.from_tensor(f"optimizer.{_prefix(key)}{entry}.{name}", value)
            for key, _, name, entry, value in self._optimizer_tensors
        ]
        plain = StateShard.from_tensor("plain", self._plain_values)
        return ShardedState([*shards, plain, StateShard.from_tensor(GENERATORS, generators), *callback_shards])

    def add_object(self, name: str, item: Any, *, is_resumed: bool) -> None:
        """Add an object to the state; restore it if the run was resumed and has its state.

        Raises ModelError if the name is taken, or if its state has a tensor.
        """
        if name in self.objects:
            raise ModelError(f"{name}: an object of this name is part of the state already")
        _describe_object(name, item)
        self.objects[name] = item
        saved = self._restored_objects.get(name)
        if is_resumed and saved is not None:
            item.load_state_dict(_merge(item.state_dict(), saved))

    def capture(self) -> None:
        """Update the state. Call after each step: an optimizer may have replaced tensors by new ones."""
        for key, parameter, _, entry, tensor in self._optimizer_tensors:
            state = self._optimizers[key].state.get(parameter, {})
            if entry in state and state[entry] is not tensor:
                state[entry] = tensor.copy_(state[entry])
        self._capture_plain_values()

    def _capture_plain_values(self) -> None:
        """Store the non-tensor values. Raises ModelError if they exceed the capacity, or for an object's tensor."""
        values = {
            "optimizers": {key: self._describe_optimizer(optimizer) for key, optimizer in self._optimizers.items()},
            "objects": {name: _describe_object(name, item) for name, item in self.objects.items()},
        }
        text = json.dumps(values).encode()
        if len(text) > _PLAIN_VALUES_BYTES:
            sizes = {
                f"{kind} {name}".strip(): len(json.dumps(value))
                for kind, parts in values.items()
                for name, value in parts.items()
            }
            largest = max(sizes, key=lambda name: sizes[name])
            raise ModelError(
                f"attach: {len(text)} bytes of non-tensor state, {sizes[largest]} of them of {largest}; the limit is "
                f"{_PLAIN_VALUES_BYTES} bytes: use fewer parameter groups, keep long lists out of state_dict"
            )
        self._plain_values.zero_()
        self._plain_values[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _describe_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        states = {name: optimizer.state.get(self.parameters[name]) for name in self._sorted_names}
        return {
            "groups": [
                _to_plain({key: value for key, value in group.items() if key != "params"})
                for group in optimizer.param_groups
            ],
            # One character for each name, sorted: there is no state yet for parameters that were never updated.
            "has_state": "".join("1" if state else "0" for state in states.values()),
            "states": {
                name: plain
                for name, state in states.items()
                if state and (plain := _to_plain({k: v for k, v in state.items() if not isinstance(v, Tensor)}))
            },
        }

    def restore(self, group: dist.ProcessGroup | None = None, device: torch.device | None = None) -> None:
        """Load the state into optimizers and objects. Call after its tensors have been filled.

        Collective over `group`: all ranks take the non-tensor values of rank 0. At a fault, one rank can have finished
        a step that another has not.
        """
        if group is not None:
            received = self._plain_values.to(device)
            dist.broadcast(received, group=group, group_src=0)
            self._plain_values.copy_(received)
        saved = json.loads(bytes(self._plain_values.numpy()).rstrip(b"\0").decode())
        if "groups" in saved:  # of a version that had one optimizer and a scheduler
            saved = {"optimizers": {"": saved}, "objects": {"scheduler": saved["scheduler"]}}
        for key, optimizer in self._optimizers.items():
            self._restore_optimizer(key, optimizer, saved["optimizers"][key])
        self._restored_objects = saved["objects"]
        for name, item in self.objects.items():
            if saved["objects"].get(name) is not None:
                item.load_state_dict(_merge(item.state_dict(), saved["objects"][name]))

    def _restore_optimizer(self, key: str, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
            for name, value in saved_group.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = _merge(group.get(name), value)
        for name, entries in saved["states"].items():
            optimizer.state[self.parameters[name]].update(entries)
        with_state = saved["states"].keys()  # in checkpoints of earlier versions, of all that have state
        if "has_state" in saved:
            flags = zip(self._sorted_names, saved["has_state"], strict=True)
            with_state = {name for name, flag in flags if flag == "1"}
        for owner, parameter, name, entry, tensor in self._optimizer_tensors:
            if owner == key and name in with_state:
                optimizer.state[parameter][entry] = tensor


def _prefix(key: str) -> str:
    return f"{key}." if key else ""


def _reset_optimizer(optimizer: torch.optim.Optimizer, initial_state: Mapping[Any, Any]) -> None:
    """Restore the optimizer state from before any step."""
    optimizer.state.clear()
    optimizer.state.update({parameter: _copy_state(state, parameter) for parameter, state in initial_state.items()})


def _copy_state(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Copy the state of a parameter; tensors of the parameter's shape go to its device."""
    return {
        key: value.detach().to(parameter.device if value.shape == parameter.shape else value.device, copy=True)
        if isinstance(value, Tensor)
        else value
        for key, value in state.items()
    }


def _describe_object(name: str, item: Any) -> Any:
    """Return the state of an object as JSON values. Raises ModelError if it has a tensor or an array."""
    state = item.state_dict()
    _check_no_tensors(f"attach: {name}: state_dict()", state)
    return _to_plain(state)


def _check_no_tensors(label: str, value: Any) -> None:
    """Raise ModelError for a tensor or array of several elements, which would be left out of the state."""
    if isinstance(value, dict):
        for key, item in value.items():
            _check_no_tensors(f"{label}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_no_tensors(f"{label}[{index}]", item)
    elif isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) > 1:
        raise ModelError(
            f"{label} is a tensor or array of shape {list(value.shape)}, and objects can keep numbers, text, lists and "
            "dicts only; make it a parameter or buffer of an nn.Module and attach that as a further model: "
            'rt.attach({"model": model, "other": other}, optimizer)'
        )


def _to_plain(value: Any) -> Any:
    """Convert numbers, strings, lists and string-keyed dicts to JSON values; return _OMITTED for other types."""
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
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
