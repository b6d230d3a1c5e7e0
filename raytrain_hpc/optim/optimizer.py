"""Optimizer over the slices that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.config.parameter_groups import find_group
from raytrain_hpc.config.schema import AUTO, OptimizerConfig
from raytrain_hpc.config.training_config import ParameterGroupConfig
from raytrain_hpc.optim.offload import MomentStorage, OptimizerChunk, check_dense
from raytrain_hpc.optim.whole_vectors import run_on_whole_vectors
from raytrain_hpc.state.sharded_state import to_local
from raytrain_hpc.torch_private import fused_adamw_, sgd

MOMENT_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": (), "muon": ("momentum_buffer",)}


def get_local_slices(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return this rank's slice of each parameter as a plain tensor."""
    return {name: to_local(parameter).detach() for name, parameter in parameters.items()}


def get_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return this rank's slice of each gradient. Parameters that the loss did not reach have none."""
    return {  # a rank may hold no row of a small tensor
        name: gradient
        for name, parameter in parameters.items()
        if parameter.grad is not None and (gradient := to_local(parameter.grad)).numel()
    }


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated with the same factor of the learning rate and the same weight decay."""

    lr_factor: float
    weight_decay: float
    names: frozenset[str]


def split_into_groups(
    parameters: Mapping[str, nn.Parameter],
    canonical_names: Mapping[str, str],
    groups: Sequence[ParameterGroupConfig],
    weight_decay: float,
) -> list[ParameterGroup]:
    """Split parameters, given by local name, by the settings that apply to them.

    `weight_decay`: that of parameters with two or more dimensions, unless a group has its own; others have none.
    """
    names: dict[tuple[float, float], set[str]] = {}
    for name, parameter in parameters.items():
        group = find_group(groups, canonical_names.get(name, name)) or ParameterGroupConfig()
        default = weight_decay if parameter.ndim >= 2 else 0.0
        decay = default if group.weight_decay == AUTO else float(group.weight_decay)
        names.setdefault((group.lr_factor, decay), set()).add(name)
    return [ParameterGroup(*settings, frozenset(members)) for settings, members in names.items()]


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD on the slices that this rank holds.

    Element-wise kernels on plain local tensors give the same numbers under any sharding, without DTensor dispatch.
    Moments exist from the start, so that every checkpoint has the same tensors. torch's functional optimizers are used,
    since its optimizer classes import TorchDynamo: 2 s and 74 MiB per worker. `storage` holds the moments; `elastic`
    makes the bits independent of the sharding. `canonical_names`: by local name, if they differ.

    `is_elementwise`: whether the update of an element depends on nothing but its gradient and its own state, other than
    for `matrix_names`.
    """

    is_elementwise = True

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimizerConfig,
        storage: MomentStorage,
        *,
        elastic: bool,
        canonical_names: Mapping[str, str] | None = None,
    ):
        self._parameters, self._config, self._storage = parameters, config, storage
        self._canonical_names = canonical_names or {}
        self._groups = split_into_groups(parameters, self._canonical_names, config.groups, config.weight_decay)
        if config.name in ("adamw", "muon"):
            check_dense(storage.slices)
        self._elastic = elastic
        self.moments = storage.moments
        self.other_state: dict[str, dict[str, Tensor]] = {}
        """State by kind and parameter that is not laid out like the parameter: each rank has all of it."""
        self.matrix_names: frozenset[str] = frozenset()
        """Parameters whose update needs whole matrices, of which this rank holds parts."""
        self.update_hooks: list[Callable[[Mapping[str, Tensor]], None]] = []
        """Functions that are called with the weights after each update of them."""
        self.num_updates = torch.zeros(1, dtype=torch.int64)
        """Updates that the moments have seen, for AdamW's bias correction. Part of the state: steps can be skipped."""

    def set_updates(self, num_updates: int) -> None:
        """Set `num_updates`, until a state that has it is loaded."""
        self.num_updates.fill_(num_updates)

    def release_memory(self) -> None:
        """Release the memory that reading or filling moments took."""
        self._storage.release_memory()

    @property
    def weights(self) -> dict[str, Tensor]:
        """This rank's slice of each parameter."""
        return get_local_slices(self._parameters)

    def get_gradients(self) -> dict[str, Tensor]:
        """Return this rank's slice of each gradient. Parameters that the loss did not reach have none."""
        return get_gradients(self._parameters)

    def step(self, lr: float) -> None:
        """Update every slice with its gradient, then drop the gradients."""
        self.apply(self.get_gradients(), lr)
        self.num_updates += 1
        self.zero_grad()

    def zero_grad(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def make_temporary(self, weights: Mapping[str, Tensor]) -> Optimizer:
        """Return an optimizer of the same settings and number of updates over other weights, whose state is zero.

        For audits: its updates have the same bits. `weights`: slices of parameters of these names, without those in
        `matrix_names`, on the device of the moments.
        """
        parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
        storage = self._storage.make_temporary(get_local_slices(parameters))
        other = Optimizer(
            parameters, self._config, storage, elastic=self._elastic, canonical_names=self._canonical_names
        )
        other.set_updates(int(self.num_updates))
        other.update_hooks = self.update_hooks
        return other

    def apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update the slices that `gradients` are of, without counting the update."""
        self._apply(gradients, lr)
        if self.update_hooks:
            weights = self.weights
            for hook in tuple(self.update_hooks):
                hook({name: weights[name] for name in gradients})

    @torch.no_grad()
    def _apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Update the slices that `gradients` are of, group by group and chunk by chunk."""
        for group in self._groups:
            selected = {name: gradient for name, gradient in gradients.items() if name in group.names}
            for chunk in self._storage.iter_chunks(selected):
                self._update(chunk, lr * group.lr_factor, group.weight_decay)

    def _update(self, chunk: OptimizerChunk, lr: float, weight_decay: float) -> None:
        weights, gradients, config = list(chunk.weights), list(chunk.gradients), self._config
        if config.name == "sgd":
            sgd(
                weights,
                gradients,
                [None] * len(weights),
                lr=lr,
                weight_decay=weight_decay,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        operands = [weights, gradients, list(chunk.moments["exp_avg"]), list(chunk.moments["exp_avg_sq"])]
        kernel = partial(self._run_adamw, lr=lr, weight_decay=weight_decay)
        if self._elastic:
            run_on_whole_vectors(kernel, operands)
        else:
            kernel(operands)

    def _run_adamw(self, operands: Sequence[list[Tensor]], *, lr: float, weight_decay: float) -> None:
        """Update weights. `operands`: weights, gradients, first and second moments."""
        for weights, gradients, first, second in _split_by_dtype(operands):
            step = torch.full((), float(self.num_updates + 1), dtype=torch.float32, device=weights[0].device)
            fused_adamw_(
                weights,
                gradients,
                first,
                second,
                [],
                [step] * len(weights),
                lr=lr,
                beta1=self._config.beta1,
                beta2=self._config.beta2,
                weight_decay=weight_decay,
                eps=self._config.eps,
                amsgrad=False,
                maximize=False,
            )


def _split_by_dtype(operands: Sequence[list[Tensor]]) -> Iterator[Sequence[list[Tensor]]]:
    """Split lists of equally many tensors by the dtype of the first list's."""
    dtypes = {tensor.dtype for tensor in operands[0]}
    if len(dtypes) == 1:
        yield operands
        return
    for dtype in sorted(dtypes, key=str):
        selected = [index for index, tensor in enumerate(operands[0]) if tensor.dtype == dtype]
        yield [[tensors[index] for index in selected] for tensors in operands]
