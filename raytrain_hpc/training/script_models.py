"""Models of a user's script, sharded or replicated, and the synchronization of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.parallelize import ParallelModel, parallelize


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
    ):
        self._context = context
        for module in models.values():
            module.to(context.device)
            if context.world_group is not None:
                for tensor in (*module.parameters(), *module.buffers()):
                    dist.broadcast(tensor.detach(), 0)
        _check_not_shared(models)
        self.parallel_models: list[ParallelModel] = []
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for module in models.values():
            before = dict(module.named_parameters())
            self.parallel_models.append(_parallelize(module, plan, config, context))
            replaced |= {before[name]: parameter for name, parameter in module.named_parameters()}
        for optimizer in optimizers.values():
            _replace_parameters(optimizer, replaced)
            # Weights that a forward pass without a backward pass has gathered would be those from before the step.
            optimizer.register_step_pre_hook(lambda *arguments: self.free_gathered_weights())

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over ranks."""
        return self._context.layout.dp_shard > 1

    def free_gathered_weights(self) -> None:
        """Drop whole weights that a forward pass has gathered."""
        for model in self.parallel_models:
            model.gradient_sync.free_gathered_weights()

    @contextmanager
    def sync_gradients(self) -> Iterator[None]:
        """Sum the gradients of the backward pass inside the context over ranks, and add them to earlier ones."""
        # Gradients of replicas that are there already are summed over ranks: they must not be summed again.
        earlier = [] if self.is_sharded else self._take_gradients()
        with ExitStack() as stack:
            for model in self.parallel_models:
                stack.enter_context(model.gradient_sync.backward_context(0, 0, is_last=True))
            yield
        for model in self.parallel_models:
            model.finish_grad_sync()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def compute_grad_norm(self) -> float:
        """Return the Euclidean norm of all gradients. Collective if they are sharded."""
        gradients = [p.grad for model in self.parallel_models for p in model.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        whole = getattr(norm, "full_tensor", None)  # of a DTensor
        return float(norm if whole is None else whole())

    def _take_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        parameters = [p for model in self.parallel_models for p in model.parameters.values()]
        taken = [(parameter, parameter.grad.clone()) for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            parameter.grad = None
        return taken


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
    module: nn.Module, plan: Mapping[str, str] | None, config: Config, context: ParallelContext
) -> ParallelModel:
    if config.origin("train.dtype") in ("", AUTO):  # a script chooses its own types
        config = copy(config)
        config.train = replace(config.train, dtype="fp32")
    return parallelize(
        {0: module},
        config=config,
        layout=context.layout,
        mesh=context.mesh,
        axes=context.axes,
        expert_mesh=None,
        device=context.device,
        reduction_order=None,
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
