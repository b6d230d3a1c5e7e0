"""Models of a user's script, sharded or replicated, and the synchronization of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import ModelError
from raytrain_hpc.optim.grad_norm import GradientNorm
from raytrain_hpc.optim.optimizer import get_gradients
from raytrain_hpc.parallel.gradient_sync import CompositeSync
from raytrain_hpc.parallel.parallelize import ParallelModel, parallelize
from raytrain_hpc.parallel.reduction_order import make_reduction_orders
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.training.module_tensors import broadcast_bytes, check_dtypes
from raytrain_hpc.training.running_statistics import RunningStatistics
from raytrain_hpc.training.state_builder import build_gradient_norm


class ScriptModels:
    """Models of a script under the layout of the run. The script's optimizers are given the sharded parameters.

    Initial weights are those of rank 0: a script need not be deterministic.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        plan: Mapping[str, str] | None,
        config: Config,
        context: ParallelContext,
        batching: Batching,
    ):
        self._context, self._is_elastic = context, config.train.deterministic == "elastic"
        for name, module in models.items():
            check_dtypes(module, f"attach: model {name}" if name else "attach: model")
            module.to(context.device)
            if context.world_group is not None:
                for tensor in (*module.parameters(), *module.buffers()):
                    broadcast_bytes(tensor)
        _check_not_shared(models)
        self.parallel_models: list[ParallelModel] = []
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for module in models.values():
            before = dict(module.named_parameters())
            self.parallel_models.append(_parallelize(module, plan, config, context, batching))
            replaced |= {before[name]: parameter for name, parameter in module.named_parameters()}
        for optimizer in optimizers.values():
            _replace_parameters(optimizer, replaced)
            # Weights that a forward pass without a backward pass has gathered would be those from before the step.
            optimizer.register_step_pre_hook(lambda *arguments: self.free_gathered_weights())
        self.modules = list(models.values())
        # The parameters of all models, by the names of their state.
        self.whole_model = ParallelModel({}, CompositeSync([model.gradient_sync for model in self.parallel_models]))
        self.whole_model.parameters = name_parameters(models)
        self._names = {parameter: name for name, parameter in self.whole_model.parameters.items()}
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        self.running_statistics = RunningStatistics(buffers, context.world_group, is_elastic=self._is_elastic)
        self._gradient_norm: GradientNorm | None = None
        self._earlier_gradients: list[tuple[nn.Parameter, Tensor]] = []

    def connect(self, indexes: list[StateIndex]) -> None:
        """Find which rank counts which gradients in the norm. `indexes`: the state of every rank."""
        self._gradient_norm = build_gradient_norm(self.whole_model, indexes, self._context, exact=self._is_elastic)

    def free_gathered_weights(self) -> None:
        """Drop whole weights that a forward pass has gathered."""
        self.whole_model.gradient_sync.free_gathered_weights()

    def begin_gradient_sync(self) -> None:
        """Set earlier gradients aside. Call before the backward passes of a batch."""
        # Gradients of replicas that are there already are summed over ranks: they must not be summed again.
        is_sharded = self._context.layout.dp_shard > 1
        self._earlier_gradients = [] if is_sharded else self._take_gradients()

    @contextmanager
    def backward_context(self, microbatch: int, *, is_last: bool) -> Iterator[None]:
        """Sum the gradients of the backward pass inside the context. `microbatch`: among those of this rank."""
        with ExitStack() as stack:
            for model in self.parallel_models:
                stack.enter_context(model.gradient_sync.backward_context(0, microbatch, is_last=is_last))
            yield

    def finish_gradient_sync(self) -> None:
        """Complete the sums over ranks, and add earlier gradients. Call after the backward passes of a batch."""
        for model in self.parallel_models:
            model.finish_grad_sync()
        for parameter, gradient in self._earlier_gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._earlier_gradients = []

    def get_gradients(self) -> dict[str, Tensor]:
        """Return this rank's slice of each gradient, by name."""
        return get_gradients(self.whole_model.parameters)

    def compute_grad_norm(self, parameters: Iterable[nn.Parameter] | None = None) -> Tensor:
        """Return the Euclidean norm of the gradients of `parameters`, fp64; None: of all. Collective if sharded."""
        if self._gradient_norm is None:
            raise RuntimeError("connect was not called")
        names = self._names.values() if parameters is None else self._find_names(parameters)
        gradients = self.get_gradients()
        return self._gradient_norm({name: gradients[name] for name in names if name in gradients})

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a norm of at most `max_norm`; return the norm before. Arithmetic of torch."""
        self.free_gathered_weights()  # `module.parameters()` yields these instead, if it is called before
        parameters = list(parameters)
        norm = self.compute_grad_norm(parameters)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        gradients = self.get_gradients()
        for name in self._find_names(parameters):
            if name in gradients:
                gradients[name].mul_(scale.to(gradients[name].dtype))
        return norm

    def _find_names(self, parameters: Iterable[nn.Parameter]) -> list[str]:
        """Return names of parameters. Raises ModelError for one that is not of an attached model."""
        parameters = list(parameters)
        if any(parameter not in self._names for parameter in parameters):
            raise ModelError("clip_grad_norm_: a parameter is not one of an attached model; pass model.parameters()")
        return [self._names[parameter] for parameter in parameters]

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        parameters = list(self._names)
        taken = [(parameter, parameter.grad.clone()) for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return taken


def name_parameters(models: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return the parameters of several models by name; "" is the key of a model without a name."""
    return {
        f"{key}.{name}" if key else name: parameter
        for key, model in models.items()
        for name, parameter in model.named_parameters()
    }


def _check_not_shared(models: Mapping[str, nn.Module]) -> None:
    """Raise ModelError if two models have a parameter in common: its gradient would be summed for each."""
    owners: dict[nn.Parameter, str] = {}
    for key, module in models.items():
        for name, parameter in module.named_parameters():
            if parameter in owners:
                raise ModelError(
                    f"attach: {key}.{name} is {owners[parameter]} too; attach a module that has both parts"
                )
            owners[parameter] = f"{key}.{name}"


def _parallelize(
    module: nn.Module,
    plan: Mapping[str, str] | None,
    config: Config,
    context: ParallelContext,
    batching: Batching,
) -> ParallelModel:
    is_elastic = config.train.deterministic == "elastic"
    dtype = "fp32" if config.origin("train.dtype") in ("", AUTO) else config.train.dtype  # a script chooses its own
    config = copy(config)
    config.train = replace(config.train, dtype=dtype, weight_copies=False)  # a script reads and changes parameters
    return parallelize(
        {0: module},
        config=config,
        layout=context.layout,
        mesh=context.mesh,
        axes=context.axes,
        expert_mesh=None,
        device=context.device,
        reduction_orders=make_reduction_orders(context.layout, batching, context.rank) if is_elastic else None,
        keyed_randomness=False,
        module_plan=plan,
    )


def _replace_parameters(optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Give an optimizer the sharded parameters in place of those that it was created with.

    Raises ModelError if it has a parameter of no model, or state that cannot be sharded.
    """
    for group in optimizer.param_groups:
        if any(parameter not in replaced for parameter in group["params"]):
            raise ModelError("attach: the optimizer has a parameter that the model does not have")
        group["params"] = [replaced[parameter] for parameter in group["params"]]
    for old, new in replaced.items():
        if old is not new and (state := optimizer.state.pop(old, None)):
            optimizer.state[new] = {key: _replace_state(value, old, new) for key, value in state.items()}


def _replace_state(value: Any, old: nn.Parameter, new: nn.Parameter) -> Any:
    """Return initial state for a sharded parameter. Raises ModelError for a tensor of different values."""
    if not isinstance(value, Tensor) or value.shape != old.shape:
        return value
    if value.numel() and not bool((value == value.flatten()[0]).all()):
        raise ModelError("attach: the optimizer has taken steps; attach it before its first step")
    return torch.full_like(new.detach(), float(value.flatten()[0]) if value.numel() else 0.0)
