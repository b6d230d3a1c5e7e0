"""The state of a user's own model, optimizer and scheduler, as slices that can be kept, saved and filled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.state.holding import Held, Holding

_PLAIN_BYTES = 1 << 16  # for numbers that are no tensors: those of parameter groups and of the scheduler
_PLAIN = (int, float, str, bool, type(None))


class Owned:
    """Every tensor of them by a name of its own; every rank holds all. Plain numbers go along as JSON in a tensor.

    An optimizer makes its tensors in its first step: it is given one that leaves no trace, so that the state has one
    shape from the beginning. Raises ModelError for parameters that the optimizer has and the model has not.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any):
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self.parameters.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._names:
                    raise ModelError("attach: the optimizer has a parameter that is none of the model's")
        self._make_state()
        self._plain = torch.zeros(_PLAIN_BYTES, dtype=torch.uint8)
        self.changed()

    def _make_state(self) -> None:
        """One step with zero gradients, of which nothing stays but that its tensors are there."""
        weights = [parameter.detach().clone() for parameter in self._names]
        settings = [{key: value for key, value in g.items() if key != "params"} for g in self._optimizer.param_groups]
        self._before = {parameter: _copied(state) for parameter, state in self._optimizer.state.items()}
        for parameter in self._names:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, before in zip(self._names, weights, strict=True):
                parameter.copy_(before)
        for group, setting in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(setting)
        self._made = list(self._state())
        self._hooks = [
            self._optimizer.register_step_pre_hook(lambda *step: self._forget()),
            self._optimizer.register_step_post_hook(lambda *step: self._adopt()),
        ]

    def _forget(self) -> None:
        """Before a new run's first step: the optimizer has seen nothing, and begins as it likes to."""
        if self._hooks:
            self._optimizer.state.clear()
            self._optimizer.state.update({parameter: _copied(state) for parameter, state in self._before.items()})

    def _adopt(self) -> None:
        """After it: what it made is kept in the tensors that are held."""
        if self._hooks:
            for name, key, held in self._made:
                state = self._optimizer.state[self.parameters[name]]
                state[key] = held.copy_(state[key])
            self._begun()

    def _begun(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(name of the parameter, key, tensor) of the optimizer's state."""
        for name, parameter in self.parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield name, key, value

    @property
    def rate(self) -> float:
        """The learning rate of the first group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def of_model(self) -> Iterator[Tensor]:
        """Parameters and buffers."""
        yield from (parameter.detach() for parameter in self._model.parameters())
        yield from self._model.buffers()

    def holding(self) -> Holding:
        """All of it."""
        held = [Held.of(f"model.{name}", parameter) for name, parameter in self.parameters.items()]
        buffers = dict(self._model.named_buffers())
        held += [Held.of(f"model.{name}", buffers[name]) for name in self._model.state_dict() if name in buffers]
        held += [Held.of(f"optimizer.{key}.{name}", value) for name, key, value in self._state()]
        return Holding([*held, Held.of("plain", self._plain)])

    def changed(self) -> None:
        """Plain numbers may be others now: note them down. ModelError where they are too many, or no plain ones."""
        said = {
            "groups": [
                {key: _as_plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
                for group in self._optimizer.param_groups
            ],
            "scheduler": None if self._scheduler is None else _plain_only(self._scheduler.state_dict()),
        }
        text = json.dumps(said).encode()
        if len(text) > _PLAIN_BYTES:
            raise ModelError(f"attach: the scheduler's state is {len(text)} bytes of plain numbers, of {_PLAIN_BYTES}")
        self._plain.zero_()
        self._plain[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def loaded(self) -> None:
        """The tensors have been filled: take the plain numbers from where they went along."""
        self._begun()
        said = json.loads(bytes(self._plain.numpy()).rstrip(b"\0").decode())
        for group, before in zip(self._optimizer.param_groups, said["groups"], strict=True):
            group.update({key: tuple(value) if isinstance(value, list) else value for key, value in before.items()})
        if self._scheduler is not None and said["scheduler"] is not None:
            self._scheduler.load_state_dict(said["scheduler"])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return isinstance(value, _PLAIN)


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _plain_only(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _as_plain(value) for key, value in state.items() if _is_plain(value)}
