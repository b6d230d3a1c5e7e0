"""Muon for the matrices of hidden layers, AdamW for all other parameters.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces the momentum of a matrix by the nearest orthogonal
matrix. The scale of updates and the weight decay are those of Liu et al. 2025 (arXiv 2502.16982), who match the size of
AdamW's updates in long runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.optim.matrix_exchange import Matrix, MatrixExchange
from raytrain_hpc.optim.newton_schulz import orthogonalize_each
from raytrain_hpc.optim.offload import MomentStorage, OnDevice, Slices
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.torch_device import is_on_accelerator

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
        make_storage: Callable[[Slices, Sequence[str]], MomentStorage] = OnDevice,
    ):
        slices = get_local_slices(parameters)
        others = make_storage({n: s for n, s in slices.items() if n not in matrices}, MOMENT_NAMES["adamw"])
        super().__init__(parameters, config, others, elastic=elastic, canonical_names=canonical_names)
        self._slices, self.matrix_names = {name: slices[name] for name in matrices}, frozenset(matrices)
        self._scales = {name: config.muon_lr_factor * sqrt(max(shape)) for name, shape in matrices.items()}
        self._elastic = elastic
        self._momenta = make_storage(self._slices, MOMENT_NAMES["muon"])
        self.moments = self.moments | self._momenta.moments
        self._exchange: MatrixExchange | None = None
        self._make_shards: MakeShards | None = None

    def connect(self, exchange: MatrixExchange, make_shards: MakeShards) -> None:
        """Set the exchange with other ranks, and the function that describes updates, by local name, as shards."""
        self._exchange, self._make_shards = exchange, make_shards

    def release_memory(self) -> None:
        """Release the memory that reading or filling moments took."""
        super().release_memory()
        self._momenta.release_memory()

    def _apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        super()._apply({name: gradient for name, gradient in gradients.items() if name not in self._slices}, lr)
        self._update_matrices(gradients, lr)

    def _update_matrices(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        updates = self.advance_momenta(self._momenta, gradients)
        self.orthogonalize(updates)
        self.change_matrices(self._slices, updates, lr)

    @property
    def exchange(self) -> MatrixExchange:
        """The exchange with other ranks. Raises RuntimeError before `connect`."""
        if self._exchange is None:
            raise RuntimeError("Muon: call connect before the first step")
        return self._exchange

    @torch.no_grad()
    def orthogonalize(
        self,
        updates: Mapping[str, Tensor],
        exchange: MatrixExchange | None = None,
        inspect: Callable[[Matrix, Tensor], None] | None = None,
    ) -> None:
        """Replace the updates of all matrices, by local name, by orthogonal ones. Collective over all ranks.

        `exchange`: instead of that of `connect`. `inspect`: see `MatrixExchange.run`.
        """
        if self._make_shards is None:
            raise RuntimeError("Muon: call connect before the first step")
        is_accelerated = any(is_on_accelerator(update) for update in updates.values())
        compute = partial(orthogonalize_each, batched=is_accelerated and not self._elastic)

        def inspect_result(matrix: Matrix, result: Tensor) -> None:
            for hook in tuple(self.update_hooks):
                hook({matrix.name: result})
            if inspect is not None:
                inspect(matrix, result)

        (exchange or self.exchange).run(self._make_shards(updates), compute, inspect_result)

    @torch.no_grad()
    def change_matrices(self, weights: Mapping[str, Tensor], updates: Mapping[str, Tensor], lr: float) -> None:
        """Change matrices by orthogonal updates, both by local name."""
        for group in self._groups:
            for name in updates.keys() & group.names:
                rate = lr * group.lr_factor
                weights[name].mul_(1 - rate * group.weight_decay).add_(updates[name], alpha=-rate * self._scales[name])

    def make_temporary_momenta(self, slices: Slices) -> MomentStorage:
        """Return momenta of zero for slices of matrices, as `make_temporary` does for other parameters."""
        return self._momenta.make_temporary(slices)

    @torch.no_grad()
    def advance_momenta(self, momenta: MomentStorage, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add gradients to momenta, and return the sums of Nesterov's method, not orthogonal yet, by local name.

        The sums overwrite the gradients.
        """
        momentum = self._config.muon_momentum
        updates = {
            name: gradients[name] if name in gradients else torch.zeros_like(weight)
            for name, weight in momenta.slices.items()
        }
        for chunk in momenta.iter_chunks(updates, targets=updates):
            operands = zip(chunk.gradients, chunk.moments["momentum_buffer"], chunk.weights, strict=True)
            for gradient, buffer, update in operands:
                buffer.lerp_(gradient, 1 - momentum)
                update.lerp_(buffer, momentum)
        return {name: self._get_compute_form(update) for name, update in updates.items()}

    def _get_compute_form(self, update: Tensor) -> Tensor:
        is_narrowed = is_on_accelerator(update) and not self._elastic and update.dtype == torch.float32
        return update.bfloat16() if is_narrowed else update
