"""Cross entropy of a vocabulary that may be sharded over ranks, and of logits that are never all in memory.

The loss of a chunk of positions and the gradients of its inputs are computed before the next chunk (Hsu et al. 2024,
arXiv 2410.10989). The backward pass only multiplies these gradients by that of the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain_hpc.config.model_spec import VOCAB_SIZE_MULTIPLE
from raytrain_hpc.model.autocast import cast_for_autocast
from raytrain_hpc.torch_device import is_on_accelerator

IGNORE_INDEX = -100  # of targets outside the loss


@dataclass(frozen=True)
class VocabularyShard:
    """The rows of the vocabulary on this rank, and reductions over the ranks that have the others, in place."""

    rows: range
    all_reduce_max: Callable[[Tensor], Tensor]
    all_reduce: Callable[[Tensor], Tensor]


@dataclass
class CrossEntropy:
    """Cross entropy [...] of logits [..., rows] and what its gradient needs. `probabilities`: [..., rows], of softmax.

    `column`: of the target, int64 [..., 1]; `is_local`: the target is on this rank; `is_valid`: it is in the loss.
    """

    loss: Tensor
    probabilities: Tensor
    column: Tensor
    is_local: Tensor
    is_valid: Tensor

    def compute_grad(self, grad_loss: Tensor | float) -> Tensor:
        """Return the gradient [..., rows] of the logits for that of the sum of losses. Overwrites the probabilities."""
        grad_logits = self.probabilities
        if grad_logits.shape[-1]:
            grad_logits.scatter_add_(-1, self.column, -self.is_local.to(grad_logits.dtype).unsqueeze(-1))
        return grad_logits.mul_((grad_loss * self.is_valid.to(grad_logits.dtype)).unsqueeze(-1))


def compute_cross_entropy(logits: Tensor, targets: Tensor, shard: VocabularyShard | None) -> CrossEntropy:
    """Compute the cross entropy of logits [..., rows] in fp32 or fp64 and targets int64 [...]; 0 at IGNORE_INDEX.

    `shard`: of the vocabulary, None: the logits have all of it.
    """
    is_valid = targets != IGNORE_INDEX
    rows = range(logits.shape[-1]) if shard is None else shard.rows
    local_max = logits.amax(dim=-1) if len(rows) else logits.new_full(logits.shape[:-1], -math.inf)
    max_logit = local_max if shard is None else shard.all_reduce_max(local_max)
    exponentials = (logits - max_logit.unsqueeze(-1)).exp_()
    is_local = (targets >= rows.start) & (targets < rows.stop)
    column = ((targets - rows.start) * is_local).unsqueeze(-1)
    target_logit = logits.gather(-1, column).squeeze(-1) * is_local if len(rows) else torch.zeros_like(max_logit)
    total = exponentials.sum(dim=-1)
    if shard is not None:  # one collective for both sums
        total, target_logit = shard.all_reduce(torch.stack((total, target_logit))).unbind()
    loss = (total.log() + max_logit - target_logit) * is_valid
    return CrossEntropy(loss, exponentials.div_(total.unsqueeze(-1)), column, is_local, is_valid)


class ChunkCrossEntropy(Protocol):
    """Computation of the loss of a chunk of positions and of its gradient."""

    def __call__(
        self, logits: Tensor, targets: Tensor, num_rows: int, shard: VocabularyShard | None, *, needs_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sum of losses, a scalar, and the gradient [n, columns] of the logits in their dtype, if needed.

        logits: [n, columns], of which the first `num_rows` count; targets: int64 [n].
        """


def compute_chunk_cross_entropy(
    logits: Tensor, targets: Tensor, num_rows: int, shard: VocabularyShard | None, *, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Implement `ChunkCrossEntropy` operation by operation."""
    entropy = compute_cross_entropy(logits[:, :num_rows].to(get_loss_dtype(logits)), targets, shard)
    loss = entropy.loss.sum()
    if not needs_grad:
        return loss, None
    grad = entropy.compute_grad(1.0).to(logits.dtype)
    return loss, F.pad(grad, (0, logits.shape[1] - num_rows)) if logits.shape[1] > num_rows else grad


def get_loss_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype in which losses are computed."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class LogitProducts:
    """The matrix products of an output head: logits, and the gradients of its input and weight.

    `needs`, in all methods: whether the gradients of the input and of the weight will be computed.
    """

    def prepare_weight(self, weight: Tensor, needs: tuple[bool, bool]) -> Any:
        """Return what the products of all chunks need of the weight [rows, hidden_size]."""
        return weight

    def compute_logits(self, x: Tensor, weight: Any, needs: tuple[bool, bool]) -> tuple[Tensor, Any]:
        """Return x [n, hidden_size] @ weight.T, [n, rows], and what the gradient of the weight needs of x.

        `weight`: as prepared.
        """
        return F.linear(x, weight), x

    def compute_grads(
        self, grad_logits: Tensor, saved: Any, weight: Any, needs: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and of the weight, as far as they are needed."""
        return grad_logits @ weight if needs[0] else None, grad_logits.t() @ saved if needs[1] else None


@dataclass(frozen=True)
class ChunkedLoss:
    """Cross entropy of a head, `num_chunks` parts of the positions one after the other.

    `shard`: of the vocabulary, None: all rows are on this rank.
    """

    num_chunks: int
    shard: VocabularyShard | None = None
    products: LogitProducts = field(default_factory=LogitProducts)
    cross_entropy: ChunkCrossEntropy = compute_chunk_cross_entropy

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy of x @ weight.T, summed over targets other than IGNORE_INDEX: a scalar.

        x: [b, t, hidden_size]; weight: [rows, hidden_size]; targets: int64 [b, t]. Losses are computed in fp64 if x is,
        else in fp32.
        """
        x, padded, num_rows = cast_for_autocast(x), cast_for_autocast(weight), len(weight)
        if is_on_accelerator(x) and num_rows % VOCAB_SIZE_MULTIPLE:  # the product is faster
            padded = F.pad(padded, (0, 0, 0, -num_rows % VOCAB_SIZE_MULTIPLE))
        loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            x.flatten(0, -2), padded, targets.flatten(), self, num_rows, torch.is_grad_enabled()
        )
        return loss


def _get_needs(ctx: Any, is_training: bool) -> tuple[bool, bool]:
    """Return whether the gradients of the input and of the weight are needed."""
    needs_x, needs_weight = (bool(is_training and needed) for needed in ctx.needs_input_grad[:2])
    return needs_x, needs_weight


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        settings: ChunkedLoss,
        num_rows: int,
        is_training: bool,
    ) -> Tensor:
        loss_dtype = get_loss_dtype(x)
        needs_x, needs_weight = needs = _get_needs(ctx, is_training)
        total = x.new_zeros((), dtype=loss_dtype)
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=loss_dtype) if needs_weight else None
        products, size = settings.products, max(1, -(-len(x) // settings.num_chunks))
        prepared = products.prepare_weight(weight, needs)
        for start in range(0, len(x), size):
            part, part_targets = x[start : start + size], targets[start : start + size]
            logits, saved = products.compute_logits(part, prepared, needs)
            loss, grad_logits = settings.cross_entropy(
                logits, part_targets, num_rows, settings.shard, needs_grad=needs_x or needs_weight
            )
            del logits
            total += loss
            if grad_logits is None:
                continue
            grads = products.compute_grads(grad_logits, saved, prepared, needs)
            if grad_x is not None and grads[0] is not None:
                grad_x[start : start + size] = grads[0]
            if grad_weight is not None and grads[1] is not None:
                grad_weight += grads[1]
            del grad_logits, grads, saved  # before the next chunk is allocated
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        if grad_x is not None:
            grad_x = grad_x * gradients[0].to(grad_x.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * gradients[0].to(grad_weight.dtype)).to(ctx.weight_dtype)
        return grad_x, grad_weight, None, None, None, None
