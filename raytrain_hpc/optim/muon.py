"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest orthogonal
matrix. The scale of updates and the weight decay are those of Liu et al. 2025 (arXiv 2502.16982), who match the size of
AdamW's updates in long runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.optim.matrix_exchange import MatrixExchange
from raytrain_hpc.optim.newton_schulz import orthogonalize_each
from raytrain_hpc.optim.offload import OnDevice
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from raytrain_hpc.state.sharded_state import ShardedState

MakeShards = Callable[[Mapping[str, Tensor]], ShardedState]


class Muon(Optimizer):
    """Muon on the matrices that this rank holds parts of, AdamW on its other parameters.

    Momentum is element-wise and stays sharded. Its orthogonalization needs whole matrices: each is computed by one
    rank, see `MatrixExchange`, in bf16 on accelerators and in the dtype of the weights on CPUs and if `elastic`.
    `matrices`: by local name, rows and columns of the whole matrix. A matrix without a gradient is updated with its
    momentum, as if the gradient were zero, since all ranks must take part.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: OptimizerConfig,
        matrices: Mapping[str, tuple[int, int]],
        *,
        elastic: bool,
        canonical_names: Mapping[str, str] | None = None,
    ):
        slices = get_local_slices(parameters)
        others = OnDevice({n: s for n, s in slices.items() if n not in matrices}, MOMENT_NAMES["adamw"])
        super().__init__(parameters, config, others, elastic=elastic, canonical_names=canonical_names)
        self._slices = {name: slices[name] for name in matrices}
        self._scales = {name: config.muon_lr_factor * sqrt(max(shape)) for name, shape in matrices.items()}
        self._elastic = elastic
        self.moments = self.moments | OnDevice(self._slices, MOMENT_NAMES["muon"]).moments
        self._exchange: MatrixExchange | None = None
        self._make_shards: MakeShards | None = None

    def connect(self, exchange: MatrixExchange, make_shards: MakeShards) -> None:
        """Set the exchange with other ranks, and the function that describes updates, by local name, as shards."""
        self._exchange, self._make_shards = exchange, make_shards

    def _apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        super()._apply({name: gradient for name, gradient in gradients.items() if name not in self._slices}, lr)
        self._update_matrices(gradients, lr)

    @torch.no_grad()
    def _update_matrices(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        if self._exchange is None or self._make_shards is None:
            raise RuntimeError("Muon: call connect before the first step")
        updates = {name: self._advance_momentum(name, gradients.get(name)) for name in self._slices}
        is_accelerated = any(update.is_cuda for update in updates.values())
        orthogonalize = partial(orthogonalize_each, batched=is_accelerated and not self._elastic)
        self._exchange.run(self._make_shards(updates), orthogonalize)
        for group in self._groups:
            for name in updates.keys() & group.names:
                rate = lr * group.lr_factor
                self._slices[name].mul_(1 - rate * group.weight_decay).add_(
                    updates[name], alpha=-rate * self._scales[name]
                )

    def _advance_momentum(self, name: str, gradient: Tensor | None) -> Tensor:
        """Add a gradient to the momentum of a matrix, and return the sum of Nesterov's method, not orthogonal yet."""
        momentum, buffer = self._config.muon_momentum, self.moments["momentum_buffer"][name]
        if gradient is None:
            gradient = torch.zeros_like(buffer)
        buffer.lerp_(gradient, 1 - momentum)
        update = torch.lerp(gradient, buffer, momentum)
        return update.bfloat16() if update.is_cuda and not self._elastic and update.dtype == torch.float32 else update
