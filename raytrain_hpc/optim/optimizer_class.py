"""Optimizer classes by path: their arguments, one step of them, and which of them work on slices.

An optimizer object lives for one step. It is given the state of its parameters and, after the step, that state is
taken from it. State can therefore be stored, sharded and restored like AdamW's moments, and weights can be updated in
chunks. `check_optimizer_class` compares this with an object that lives on, and with whole parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.errors import ConfigError

State = dict[str, Any]  # of one parameter, by name as the class gives it

_KEY = "optimizer.name"
_TOLERANCE = 1e-5  # of a relative difference that is rounding


class OptimizerClass:
    """An optimizer class with its arguments. `elastic`: choose kernels whose bits do not depend on the sharding.

    Raises ConfigError if the class cannot be imported or is no optimizer, or if an argument cannot be used.
    """

    def __init__(self, config: Config):
        settings = config.optimizer
        self.name, self.lr = settings.name, settings.lr
        self.build_error = partial(ConfigError, _KEY, settings.name, config.origin(_KEY))
        """Return a ConfigError with this remedy."""
        self._class = self._load()
        parameters = inspect.signature(self._class).parameters
        if "lr" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise self.build_error("has no argument lr, which the schedule sets; use another class")
        self._arguments: dict[str, Any] = {name: _parse_number(value) for name, value in settings.args.items()}
        if config.train.deterministic == "elastic":
            if self._arguments.get("fused"):
                remedy = "fused kernels are not bit-exact under train.deterministic=elastic; leave fused out"
                raise ConfigError("optimizer.args", settings.args, config.origin("optimizer.args"), remedy)
            if "foreach" in parameters:
                self._arguments.setdefault("foreach", True)
        default = parameters["weight_decay"].default if "weight_decay" in parameters else None
        self.weight_decay: float | None = self._arguments.get("weight_decay", default)
        """Weight decay of parameters with two or more dimensions; None: the class has none."""
        decays = [group.weight_decay for group in settings.groups if group.weight_decay != AUTO]
        if decays and self.weight_decay is None:
            key, remedy = "optimizer.groups", f"{self.name} has no argument weight_decay; leave it out"
            raise ConfigError(f"{key}.weight_decay", decays[0], config.origin(key), remedy)

    def create(self, parameters: Sequence[nn.Parameter], weight_decay: float | None) -> torch.optim.Optimizer:
        """Return an optimizer without state. Raises ConfigError if the class refuses the parameters or arguments."""
        group: dict[str, Any] = {"params": list(parameters)}
        if weight_decay is not None:
            group["weight_decay"] = weight_decay
        try:
            optimizer: torch.optim.Optimizer = self._class([group], **{"lr": self.lr} | self._arguments)
        except Exception as error:  # of any type: the class is a package's or the user's
            raise self.build_error(
                f"cannot be created with args={self._arguments}: {_get_first_line(error)}"
            ) from error
        return optimizer

    def step(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        states: Sequence[State],
        lr: float,
        weight_decay: float | None,
    ) -> list[State]:
        """Update weights in place, and return the new states. A state is empty before the first step of a weight."""
        parameters = [nn.Parameter(weight) for weight in weights]  # share memory with the weights
        optimizer = self.create(parameters, weight_decay)
        for parameter, gradient, state in zip(parameters, gradients, states, strict=True):
            parameter.grad = gradient
            if state:
                optimizer.state[parameter] = state
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        return [dict(optimizer.state.get(parameter, {})) for parameter in parameters]

    def _load(self) -> type[torch.optim.Optimizer]:
        module_name, _, class_name = self.name.rpartition(".")
        try:
            loaded = getattr(import_module(module_name), class_name)
        except Exception as error:  # of any type: importing runs a package's code
            raise self.build_error(f"cannot be imported: {type(error).__name__}: {_get_first_line(error)}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, torch.optim.Optimizer)):
            raise self.build_error("is not a subclass of torch.optim.Optimizer")
        if loaded is torch.optim.Muon:
            raise self.build_error(
                "orthogonalizes whole matrices, but ranks hold slices, and has no rule for other parameters; use "
                "optimizer.name=muon"
            )
        closure = inspect.signature(loaded.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise self.build_error("evaluates the loss several times per step through a closure; use another optimizer")
        return loaded


def check_optimizer_class(config: Config) -> None:
    """Raise ConfigError if the optimizer that optimizer.name gives as a path cannot be used under these settings.

    Three steps on small parameters are taken by an object that lives on, by `OptimizerClass.step`, and by the latter on
    halves of the parameters. The first two differ if the class keeps state elsewhere than in `state`. The last two
    differ if the update of an element depends on other elements: then ranks may not hold slices of a parameter.
    """
    optimizer_class = OptimizerClass(config)
    fail = optimizer_class.build_error
    try:
        expected, actual = _run_object(optimizer_class), _run_steps(optimizer_class, num_parts=1)
        by_halves = _run_steps(optimizer_class, num_parts=2)
    except ConfigError:
        raise
    except Exception as error:  # an optimizer may raise any type
        raise fail(f"a step on small parameters fails: {type(error).__name__}: {_get_first_line(error)}") from error
    if not _measure_difference(actual, expected) <= _TOLERANCE:
        raise fail(
            "keeps state in its attributes or parameter groups, which no checkpoint would hold; keep it in `state`, as "
            "tensors or numbers"
        )
    difference, reason = _measure_difference(by_halves, actual), _find_slicing(config)
    if reason and not difference <= _TOLERANCE:
        raise fail(
            f"updates an element by other elements of its parameter: halves of a matrix get an update that differs by "
            f"{difference:.1g} from that of the whole, and {reason} slices parameters; set that back, or use an "
            "element-wise optimizer"
        )


def _find_slicing(config: Config) -> str:
    """Return the setting with which the optimizer sees slices of parameters, or ""."""
    parallel = config.parallel
    slicing = {
        f"parallel.zero={parallel.zero}": parallel.zero > 0,
        f"parallel.tp={parallel.tp}": parallel.tp > 1,
        f"parallel.ep={parallel.ep}": parallel.ep > 1,
        f"parallel.offload={parallel.offload}": parallel.offload != "none",
    }
    return next((setting for setting, is_slicing in slicing.items() if is_slicing), "")


def _make_probe() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return weights, one matrix and one vector, and their gradients in each of three steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 4), (6,)]
    weights, *gradients = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4))
    return weights, gradients


def _run_object(optimizer_class: OptimizerClass) -> list[Tensor]:
    """Return the weights of the probe after three steps of one object."""
    weights, gradients = _make_probe()
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = optimizer_class.create(parameters, optimizer_class.weight_decay)
    for step_gradients in gradients:
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return weights


def _run_steps(optimizer_class: OptimizerClass, num_parts: int) -> list[Tensor]:
    """Return the weights of the probe, split into parts by rows, after three steps of `OptimizerClass.step`."""
    weights, gradients = _make_probe()
    parts = [part for weight in weights for part in weight.tensor_split(num_parts)]
    states: list[State] = [{} for _ in parts]
    for step_gradients in gradients:
        gradient_parts = [part.clone() for gradient in step_gradients for part in gradient.tensor_split(num_parts)]
        states = optimizer_class.step(parts, gradient_parts, states, optimizer_class.lr, optimizer_class.weight_decay)
    return weights


def _measure_difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the change of the weights."""
    initial, _ = _make_probe()
    changes = max(float((e - i).abs().max()) for e, i in zip(expected, initial, strict=True))
    difference = max(float((a - e).abs().max()) for a, e in zip(actual, expected, strict=True))
    return difference / changes if changes else difference


def _parse_number(value: Any) -> Any:
    """Convert text that is a number, also in lists: YAML reads 1e-6 as text."""
    if isinstance(value, list):
        return [_parse_number(item) for item in value]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _get_first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def find_state(optimizer_class: OptimizerClass, weight: Tensor) -> State:
    """Return the state of a weight after a step with a gradient of zero. The weight does not change.

    Raises ConfigError for state that is neither a tensor nor a number.
    """
    (state,) = optimizer_class.step(
        [weight.clone()], [torch.zeros_like(weight)], [{}], optimizer_class.lr, optimizer_class.weight_decay
    )
    for key, value in state.items():
        if not isinstance(value, Tensor | int | float):
            raise optimizer_class.build_error(f"keeps {key} of type {type(value).__name__}, which cannot be stored")
    return state
