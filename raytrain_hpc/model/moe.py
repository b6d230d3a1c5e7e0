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

from raytrain_hpc.config.model_spec import ModelShape

Places = Callable[["Experts", Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Feed-forwards without biases: `up` and `gate` [experts, ffn_size, hidden_size], `down` the other way round."""

    def __init__(self, shape: ModelShape, count: int, width: int):
        """`count` experts of `width` channels: those, and that much of each, that a rank holds."""
        super().__init__()
        size = (count, width, shape.hidden_size)
        self.gate = nn.Parameter(torch.empty(size)) if shape.activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(size))
        self.down = nn.Parameter(torch.empty(count, shape.hidden_size, width))
        self.grouped: Callable[[Tensor, Tensor, Sequence[int]], Tensor] = grouped_linear

    def forward(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """What the experts make of rows [n, hidden_size], the first sizes[0] for the first expert and so on."""
        up = self.grouped(rows, self.up, sizes)
        if self.gate is None:
            return self.grouped(F.gelu(up, approximate="tanh"), self.down, sizes)
        return self.grouped(F.silu(self.grouped(rows, self.gate, sizes)) * up, self.down, sizes)


def grouped_linear(rows: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Products of runs of rows [n, i] with one matrix each of weight [experts, o, i]: [n, o]. A run may be empty."""
    return torch.cat(
        [F.linear(run, one) for run, one in zip(torch.split(rows, list(sizes)), weight.unbind(), strict=True)]
    )


def experts_here(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """All experts on this rank: rows [n, hidden_size] in the order of experts, counts int64 [experts] of each."""
    return experts(rows, counts.tolist())  # type: ignore[no-any-return]


class Router(nn.Module):
    """Which experts a position goes to, and with which weights."""

    bias: Tensor
    load: Tensor

    def __init__(self, shape: ModelShape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.num_experts, shape.hidden_size))
        self.chosen = shape.experts_per_token
        self.pressure = shape.balance_weight if shape.balance == "loss" else 0.0
        self.share = 1.0  # of the balancing loss's gradient that this rank adds, where peers route the same positions
        self.over_sequence: Callable[[Tensor], Tensor] = _as_it_is  # sums counts where a sequence is on several ranks
        # Zero unless `model.balance` is bias; then the choices of a resumed run depend on it.
        self.register_buffer("bias", torch.zeros(shape.num_experts), persistent=shape.balance == "bias")
        # Positions each expert got in this step, for the bias; counted in backward passes, which recompute nothing.
        self.register_buffer("load", torch.zeros(shape.num_experts, dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, counted: float) -> tuple[Tensor, Tensor]:
        """Experts int64 [b, t, k] of x [b, t, hidden_size] and their weights [b, t, k].

        In fp32, or fp64 where x is. `counted`: 0 for a microbatch that is run for others' sake, else 1.
        """
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(exact), self.weight.to(exact)).softmax(dim=-1)
        experts = (scores.detach() + self.bias).topk(self.chosen, dim=-1).indices
        if self.training and torch.is_grad_enabled():
            scores = self._balanced(scores, experts, counted)
        weights = scores.gather(-1, experts)
        return experts, weights / weights.sum(dim=-1, keepdim=True) if self.chosen > 1 else weights

    def _balanced(self, scores: Tensor, experts: Tensor, counted: float) -> Tensor:
        """The same scores, whose gradient also has that of the balancing loss.

        The loss of a sequence of T positions, summed over them, is T sum_e f_e P_e with f_e = E / (k T) times e's
        positions and P_e its mean score: its gradient at every position is f. As a term of its own it would have to
        find its way out of stages and recomputed blocks.
        """
        counts = F.one_hot(experts, scores.shape[-1]).sum(dim=(1, 2))
        sequence = self.over_sequence(counts)
        share = sequence * scores.shape[-1] / sequence.sum(dim=-1, keepdim=True)
        slope = (self.pressure * self.share * counted) * share.to(scores.dtype).unsqueeze(1)
        load = counts.sum(dim=0) if counted else torch.zeros_like(self.load)
        balanced: Tensor = _Balance.apply(scores, slope, load, self.load)  # type: ignore[no-untyped-call]
        return balanced


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, slope: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.save_for_backward(slope, counts)
        ctx.load = load
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        slope, counts = ctx.saved_tensors
        ctx.load.add_(counts)
        return gradients[0] + slope, None, None, None


def _as_it_is(x: Tensor) -> Tensor:
    return x


class MixtureOfExperts(nn.Module):
    """A feed-forward of experts, in place of a dense one; `shared` sees every position, None where there is none."""

    def __init__(self, shape: ModelShape, shared: nn.Module | None):
        super().__init__()
        self.router = Router(shape)
        self.experts = Experts(shape, shape.num_experts, shape.ffn_size)
        self.shared = shared
        self.experts_in_all = shape.num_experts
        self.places: Places = experts_here
        self.complete: Callable[[Tensor], Tensor] = _as_it_is  # where ranks have some channels of each expert

    def forward(self, x: Tensor, counted: float) -> Tensor:
        """What the experts add to the residual stream, [b, t, hidden_size]; `counted` as in `Router`."""
        experts, weights = self.router(x, counted)
        width, k = x.shape[-1], experts.shape[-1]
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=self.experts_in_all)
        # Every position k times, then in the order of experts: gradients are summed in one order on any device.
        rows = x.reshape(-1, 1, width).expand(-1, k, -1).reshape(-1, width)[order]
        made = self.places(self.experts, rows, counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        mixed = (made[back].view(*x.shape[:-1], k, width) * weights.unsqueeze(-1).to(made.dtype)).sum(dim=-2)
        routed = self.complete(mixed.to(x.dtype))
        return routed if self.shared is None else routed + self.shared(x)
