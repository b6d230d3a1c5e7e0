"""A mixture of experts: every position goes to a few of many feed-forwards, and no choice is ever dropped.

Routing is a softmax over all experts, of which the k most likely are taken and weighted by their probabilities, divided
by their sum where k > 1 (Shazeer et al. 2017, arXiv 1701.06538; Jiang et al. 2024, arXiv 2401.04088). A shared expert
sees every position. Two ways keep experts busy: a loss over each sequence, or a bias on the choice alone (DeepSeek-AI
2024, arXiv 2412.19437, equations 16 to 20).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec

ExpertDispatcher = Callable[["Experts", Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Feed-forwards without biases: `up` and `gate` [experts, ffn_size, hidden_size], `down` the other way round."""

    def __init__(self, spec: ModelSpec, num_experts: int, ffn_size: int):
        """`count` experts of `width` channels: those, and that much of each, that a rank holds."""
        super().__init__()
        size = (num_experts, ffn_size, spec.hidden_size)
        self.gate = nn.Parameter(torch.empty(size)) if spec.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(size))
        self.down = nn.Parameter(torch.empty(num_experts, spec.hidden_size, ffn_size))
        self.grouped_linear: Callable[[Tensor, Tensor, Sequence[int]], Tensor] = grouped_linear

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """What the experts make of rows [n, hidden_size], the first sizes[0] for the first expert and so on."""
        up = self.grouped_linear(rows, self.up, sizes)
        if self.gate is None:
            return self.grouped_linear(F.gelu(up, approximate="tanh"), self.down, sizes)
        return self.grouped_linear(F.silu(self.grouped_linear(rows, self.gate, sizes)) * up, self.down, sizes)


def grouped_linear(rows: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Products of runs of rows [n, i] with one matrix each of weight [experts, o, i]: [n, o]. A run may be empty."""
    return torch.cat(
        [F.linear(run, one) for run, one in zip(torch.split(rows, list(sizes)), weight.unbind(), strict=True)]
    )


def run_local_experts(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """All experts on this rank: rows [n, hidden_size] in the order of experts, counts int64 [experts] of each."""
    return experts(rows, counts.tolist())  # type: ignore[no-any-return]


class Router(nn.Module):
    """Which experts a position goes to, and with which weights."""

    bias: Tensor
    load: Tensor

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size))
        self.top_k = spec.experts_per_token
        self.balance_weight = spec.balance_weight if spec.balance == "loss" else 0.0
        self.balance_scale = (
            1.0  # of the balancing loss's gradient that this rank adds, where peers route the same positions
        )
        self.reduce_counts: Callable[[Tensor], Tensor] = _identity  # sums counts where a sequence is on several ranks
        # Zero unless `model.balance` is bias; then the choices of a resumed run depend on it.
        self.register_buffer("bias", torch.zeros(spec.num_experts), persistent=spec.balance == "bias")
        # Positions each expert got in this step, for the bias; counted in backward passes, which recompute nothing.
        self.register_buffer("load", torch.zeros(spec.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, loss_weight: float) -> tuple[Tensor, Tensor]:
        """Experts int64 [b, t, k] of x [b, t, hidden_size] and their weights [b, t, k].

        In fp32, or fp64 where x is. `counted`: 0 for a microbatch that is run for others' sake, else 1.
        """
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(exact), self.weight.to(exact)).softmax(dim=-1)
        experts = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        if self.training and torch.is_grad_enabled():
            scores = self._add_balance_grad(scores, experts, loss_weight)
        weights = scores.gather(-1, experts)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.top_k > 1 else weights

    def _add_balance_grad(self, scores: Tensor, experts: Tensor, loss_weight: float) -> Tensor:
        """The same scores, whose gradient also has that of the balancing loss.

        The loss of a sequence of T positions, summed over them, is T sum_e f_e P_e with f_e = E / (k T) times e's
        positions and P_e its mean score: its gradient at every position is f. As a term of its own it would have to
        find its way out of stages and recomputed blocks.
        """
        counts = F.one_hot(experts, scores.shape[-1]).sum(dim=(1, 2))
        sequence = self.reduce_counts(counts)
        share = sequence * scores.shape[-1] / sequence.sum(dim=-1, keepdim=True)
        slope = (self.balance_weight * self.balance_scale * loss_weight) * share.to(scores.dtype).unsqueeze(1)
        load = counts.sum(dim=0) if loss_weight else torch.zeros_like(self.load)
        balanced: Tensor = _BalanceLoss.apply(scores, slope, load, self.load)  # type: ignore[no-untyped-call]
        return balanced


class _BalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, grad: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(grad, counts)
        ctx.load = load
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        slope, counts = ctx.saved_tensors
        ctx.load.add_(counts)
        return gradients[0] + slope, None, None, None


def _identity(x: Tensor) -> Tensor:
    return x


class MixtureOfExperts(nn.Module):
    """A feed-forward of experts, in place of a dense one; `shared` sees every position, None where there is none."""

    def __init__(self, spec: ModelSpec, shared: nn.Module | None):
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec, spec.num_experts, spec.ffn_size)
        self.shared = shared
        self.num_experts = spec.num_experts
        self.dispatcher: ExpertDispatcher = run_local_experts
        self.reduce_output: Callable[[Tensor], Tensor] = _identity  # where ranks have some channels of each expert

    def forward(self, x: Tensor, loss_weight: float) -> Tensor:
        """What the experts add to the residual stream, [b, t, hidden_size]; `counted` as in `Router`."""
        experts, weights = self.router(x, loss_weight)
        width, k = x.shape[-1], experts.shape[-1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.num_experts)
        # Every position k times, then in the order of experts: gradients are summed in one order on any device.
        rows = x.reshape(-1, 1, width).expand(-1, k, -1).reshape(-1, width)[order]
        made = self.dispatcher(self.experts, rows, counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        mixed = (made[back].view(*x.shape[:-1], k, width) * weights.unsqueeze(-1).to(made.dtype)).sum(dim=-2)
        routed = self.reduce_output(mixed.to(x.dtype))
        return routed if self.shared is None else routed + self.shared(x)
