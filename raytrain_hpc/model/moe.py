"""Mixture of experts (MoE) with top-k routing and without dropped positions.

The router takes a softmax over all experts and selects the k most likely. Their probabilities are the weights, divided
by their sum if k > 1 (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, arXiv 2401.04088). A shared expert
processes every position. Load is balanced by a loss per sequence or by a bias that affects only the selection
(DeepSeek-AI 2024, arXiv 2412.19437, equations 16 to 20).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.model.grouped_linear import grouped_linear


class Experts(nn.Module):
    """Feed-forward networks without biases, as stacked weights.

    `up`, `gate`: [num_experts, ffn_size, hidden_size]; `down`: [num_experts, hidden_size, ffn_size].
    """

    def __init__(self, spec: ModelSpec, num_experts: int, ffn_size: int):
        """`num_experts`, `ffn_size`: of the local shard of the experts."""
        super().__init__()
        size = (num_experts, ffn_size, spec.hidden_size)
        self.gate = nn.Parameter(torch.empty(size)) if spec.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(size))
        self.down = nn.Parameter(torch.empty(num_experts, spec.hidden_size, ffn_size))
        self.gelu = partial(F.gelu, approximate=spec.gelu_approximation)
        self.grouped_linear: Callable[[Tensor, Tensor, Tensor, bool], Tensor] = grouped_linear
        self.use_kernel = False  # of `grouped_linear`
        # Apply the activation to each group of rows by itself. The last elements of a tensor can get other bits than
        # the others, from another instruction: with it, bits depend on the rows of a group only.
        self.activates_groups = False

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Return outputs [n, hidden_size] of rows [n, hidden_size], sorted by expert.

        sizes: int64 [num_experts], rows per expert.
        """
        up = self.grouped_linear(rows, self.up, sizes, self.use_kernel)
        if self.gate is None:
            hidden = self._activate(self.gelu, up, sizes)
        else:
            gate = self.grouped_linear(rows, self.gate, sizes, self.use_kernel)
            hidden = self._activate(F.silu, gate, sizes) * up
        return self.grouped_linear(hidden, self.down, sizes, self.use_kernel)

    def _activate(self, function: Callable[[Tensor], Tensor], x: Tensor, sizes: Tensor) -> Tensor:
        if not self.activates_groups or torch.compiler.is_compiling():
            return function(x)
        return torch.cat([function(group) for group in torch.split(x, sizes.tolist())])


class ExpertDispatcher(Protocol):
    """Sends rows to the ranks of their experts, and back."""

    @property
    def start(self) -> Callable[[Tensor, Tensor], Any]:
        """Start to send rows [n, hidden_size], sorted by expert; return what `finish` needs.

        The second argument: int64 [num_experts], rows per expert.
        """

    @property
    def finish(self) -> Callable[[Experts, Any], Tensor]:
        """Return the outputs [n, hidden_size] of the experts, for what `start` has returned."""


class LocalDispatcher:
    """The dispatcher of experts that are all on this rank."""

    def start(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Implement `ExpertDispatcher.start`."""
        return rows, counts

    def finish(self, experts: Experts, pending: tuple[Tensor, Tensor]) -> Tensor:
        """Implement `ExpertDispatcher.finish`."""
        output: Tensor = experts(*pending)
        return output


class Router(nn.Module):
    """The router: selects experts for each position and their weights."""

    bias: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size))
        self.top_k = spec.experts_per_token
        self.balance_weight = spec.load_balancing_weight if spec.load_balancing == "loss" else 0.0
        # Scale of the gradient of the balancing loss: 1 / n if n ranks route the same positions.
        self.balance_scale = 1.0
        # Sums counts over ranks if a sequence is sharded over them.
        self.reduce_counts: Callable[[Tensor], Tensor] = _identity
        # Zero unless `model.load_balancing` is "bias". Then it is saved, since routing in a resumed run depends on it.
        self.register_buffer("bias", torch.zeros(spec.num_experts), persistent=spec.load_balancing == "bias")
        # Positions per expert in this step, for the bias. Counted in backward passes, since forward passes may be
        # recomputed.
        self.register_buffer("load", torch.zeros(spec.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the experts int64 [b, t, k] of x [b, t, hidden_size] and their weights [b, t, k].

        Computed in fp64 if x is fp64, else in fp32. counted: bool [b, t], positions that count in the balancing loss
        and the load, which padding should not; None: all.
        """
        score_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(score_dtype), self.weight.to(score_dtype)).softmax(dim=-1)
        experts = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        if self.training and torch.is_grad_enabled():
            scores = self._add_balance_grad(scores, experts, counted)
        weights = scores.gather(-1, experts)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.top_k > 1 else weights

    def _add_balance_grad(self, scores: Tensor, experts: Tensor, counted: Tensor | None) -> Tensor:
        """Return the scores unchanged, with the gradient of the balancing loss added in the backward pass.

        The loss of a sequence of T counted positions, summed over them, is T sum_e f_e P_e. f_e is E / (k T) times the
        number of positions of expert e, and P_e is its mean score. The gradient at each position is f. A separate loss
        term would have to be returned from pipeline stages and recomputed blocks.
        """
        routes, mask = F.one_hot(experts, scores.shape[-1]), scores.new_ones(())
        if counted is not None:
            routes, mask = routes * counted[..., None, None], counted.unsqueeze(-1)
        counts = routes.sum(dim=(1, 2))
        sequence_counts = self.reduce_counts(counts).to(scores.dtype)
        load_fraction = sequence_counts * scores.shape[-1] / sequence_counts.sum(dim=-1, keepdim=True).clamp(min=1)
        grad = (self.balance_weight * self.balance_scale) * load_fraction.unsqueeze(1)
        # The bias of a frozen router stays: the layer is not to change. Its scores need a gradient or not, depending on
        # what is trained below, and in a later stage of a pipeline always.
        load = counts.sum(dim=0) if self.weight.requires_grad else torch.zeros_like(self.load)
        balanced: Tensor = _BalanceLoss.apply(scores, grad, mask, load, self.load)  # type: ignore[no-untyped-call]
        return balanced


class _BalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, grad: Tensor, mask: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(grad, mask, counts)
        ctx.load = load
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad, mask, counts = ctx.saved_tensors
        ctx.load.add_(counts)
        return gradients[0] + grad * mask, None, None, None, None


def _identity(x: Tensor) -> Tensor:
    return x


class MixtureOfExperts(nn.Module):
    """A mixture of experts that replaces a dense feed-forward. `shared`: the shared expert, None: none."""

    def __init__(self, spec: ModelSpec, shared: nn.Module | None):
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec, spec.num_experts, spec.ffn_size)
        self.shared = shared
        self.num_experts = spec.num_experts
        self.dispatcher: ExpertDispatcher = LocalDispatcher()
        # Sums outputs over ranks if the channels of each expert are sharded.
        self.reduce_output: Callable[[Tensor], Tensor] = _identity

    def forward(self, x: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of expert outputs, [b, t, hidden_size]. counted: see `Router`."""
        experts, weights = self.router(x, counted)
        width, k = x.shape[-1], experts.shape[-1]
        sorted_experts, order = experts.flatten().sort(stable=True)
        counts = torch.searchsorted(sorted_experts, torch.arange(self.num_experts + 1, device=x.device)).diff()
        inverse_order = invert_order(order)
        pending = self.dispatcher.start(_repeat_and_reorder(x.reshape(-1, width), order, inverse_order, k), counts)
        shared = None if self.shared is None else self.shared(x)  # while rows are sent
        outputs = reorder_rows(self.dispatcher.finish(self.experts, pending), inverse_order, order)
        weighted = outputs.view(*x.shape[:-1], k, width) * weights.unsqueeze(-1).to(outputs.dtype)
        routed = self.reduce_output(weighted.sum(dim=-2).to(x.dtype))
        return routed if shared is None else routed + shared


def invert_order(order: Tensor) -> Tensor:
    """Return the order that undoes `order`, int64 [n], for `reorder_rows`."""
    inverse_order = torch.empty_like(order)
    inverse_order[order] = torch.arange(len(order), device=order.device)
    return inverse_order


def reorder_rows(rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
    """Return rows[order]. The backward pass indexes with `inverse_order`; that of torch sorts and adds."""
    return _repeat_and_reorder(rows, order, inverse_order, 1)


def _repeat_and_reorder(rows: Tensor, order: Tensor, inverse_order: Tensor, times: int) -> Tensor:
    """Repeat each row `times` times in place, then reorder. Gradients are added in the same order on any device."""
    reordered: Tensor = _RepeatAndReorder.apply(rows, order, inverse_order, times)  # type: ignore[no-untyped-call]
    return reordered


class _RepeatAndReorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse_order: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(inverse_order)
        ctx.times = times
        return rows[order if times == 1 else order // times]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_order,) = ctx.saved_tensors
        grad_rows = gradients[0][inverse_order]
        if ctx.times > 1:
            grad_rows = grad_rows.view(-1, ctx.times, grad_rows.shape[-1]).sum(dim=1)
        return grad_rows, None, None, None
