"""Activation offload: what moves, what stays, and the same bits as without it on every layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import reduce
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel import activation_offload
from raytrain_hpc.parallel.activation_checkpoint import apply_activation_checkpointing
from raytrain_hpc.parallel.activation_offload import ActivationOffload
from raytrain_hpc.parallel.compile import compile_blocks
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.builder import build_trainer
from tests.parallel.compiled_run import trace_only
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, make_small_config

CPU = torch.device("cpu")
WIDTH, ROWS = 32, 24
OFFLOAD = "parallel.activation_offload=cpu"
WORDS = ["model.num_layers=4", "model.dropout=0.1", "train.micro_batch_size=3", "train.steps=2", "optimizer.lr=3e-3"]
LAYOUTS = {
    "dp-2": ["cluster.workers=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "zero3-2, tiles": ["cluster.workers=2", "parallel.zero=3", "parallel.tile_mib=0.004", "model.num_layers=2"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "ring-2": ["cluster.workers=2", "parallel.cp=2"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "pp-2, zbv": ["cluster.workers=2", "parallel.pp=2", "parallel.pp_schedule=zbv"],
    "bf16": ["train.dtype=bf16"],
    "lora": ["lora.rank=3"],
    "experts": ["cluster.workers=2", "model.num_experts=4", "parallel.ep=2"],
}
RECOMPUTE = {
    "none": [],
    "selective": ["parallel.activation_checkpointing=selective"],
    "full": ["parallel.activation_checkpointing=full"],
    "full in one layer": ["parallel.activation_checkpointing=full", "parallel.recompute_layers=1"],
}
# Every layout with the policy that keeps most, and the others with a pipeline, gathered weights and split tensors.
CASES = [(layout, "none") for layout in LAYOUTS]
CASES += [("zero3-2", "selective"), ("zero3-2", "full"), ("pp-2, zbv", "selective"), ("pp-2, zbv", "full")]
CASES += [("pp-2, zbv", "full in one layer"), ("tp-2", "selective"), ("ring-2", "full")]


class Block(nn.Module):
    """A block with a norm, a linear layer whose input two functions keep, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        normalized = F.layer_norm(x, (WIDTH,)) * scale
        return x + torch.sin(normalized) + self.linear(normalized).square()


def run_blocks(blocks: list[nn.Module]) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and the gradients of input and weights."""
    torch.manual_seed(3)
    x, scale = torch.randn(ROWS, WIDTH, requires_grad=True), torch.rand(WIDTH * 16)[::16]
    h = x * 1.0
    for block in blocks:
        h = block(h, scale)
    h.sum().backward()  # type: ignore[no-untyped-call]
    return h.detach(), [x.grad, *(p.grad for block in blocks for p in block.parameters())]  # type: ignore[list-item]


def make_blocks(count: int) -> list[nn.Module]:
    torch.manual_seed(2)
    return [Block() for _ in range(count)]


class CopyRecorder:
    """Records the bytes that are copied to the host, and those of other storages that were packed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, count: int, *, pinned: bool) -> Tensor:
        assert not pinned, "page-locked memory is for GPUs"
        self.sizes.append(count)
        return torch.empty(count, dtype=torch.uint8)


def record_copies() -> tuple[CopyRecorder, Any]:
    recorder = CopyRecorder()
    return recorder, patch.object(activation_offload, "allocate_host_bytes", recorder.allocate)


@pytest.mark.parametrize(("policy", "is_compiled"), [("none", False), ("full", False), ("none", True)])
def test_gradients_are_the_same_bits(policy: str, is_compiled: bool) -> None:
    plain, blocks, (recorder, recording) = make_blocks(4), make_blocks(4), record_copies()
    for stage in (plain, blocks):
        apply_activation_checkpointing(stage, policy, keyed_randomness=True)
        if is_compiled:
            with trace_only():
                compile_blocks(stage)
    expected, expected_grads = run_blocks(plain)
    ActivationOffload(CPU).apply(blocks)
    with recording:
        output, grads = run_blocks(blocks)
    assert torch.equal(output, expected)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected_grads, strict=True))
    activation = ROWS * WIDTH * 4
    # Kept are x (by the norm), the scaled output of the norm (by sin and the product, copied once) and the product (by
    # square). Weights, which have another size, and the scale stay. The newest block does not move.
    num_kept = len(recorder.sizes) // 3 if is_compiled else 3 if policy == "none" else 1  # the compiler decides
    assert recorder.sizes == [activation] * num_kept * 3 and num_kept >= 1


class LateEngine(activation_offload._CopyEngine):
    """Copies as late as the streams of a GPU may: when the stream of the passes waits. Until then they are garbage."""

    def _copy(self, sources: Sequence[Tensor], copies: Sequence[Tensor], direction: int) -> Any:
        for copy in copies:
            copy.fill_(255)
        return [*zip(sources, copies, strict=True)]

    def wait(self, event: Any) -> None:
        for source, copy in event or ():
            copy.numpy()[:] = source.numpy()  # unlike `copy_`, no change in place that autograd would see


@pytest.mark.parametrize("policy", ["none", "full"])
def test_tensors_are_used_after_a_wait_for_their_copies(policy: str) -> None:
    """Also if two microbatches are in flight, whose backward passes are in another order."""
    expected, expected_grads = run_blocks(make_blocks(4))
    blocks = make_blocks(4)
    apply_activation_checkpointing(blocks, policy, keyed_randomness=True)
    with patch.object(activation_offload, "_CopyEngine", LateEngine):
        ActivationOffload(CPU).apply(blocks)
    output, grads = run_blocks(blocks)
    assert torch.equal(output, expected)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, expected_grads, strict=True))
    torch.manual_seed(4)
    inputs, scale = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(3)], torch.ones(WIDTH)
    for order in ((0, 1, 2), (2, 0, 1)):
        found = []
        for stage in (make_blocks(4), blocks):
            outputs = [reduce(lambda h, block: block(h, scale), stage, x * 1.0) for x in inputs]
            for number in order:
                outputs[number].square().sum().backward()
            found.append([x.grad for x in inputs])
            for x in inputs:
                x.grad = None
        assert all(torch.equal(grad, other) for grad, other in zip(*found, strict=True))


def test_the_device_holds_two_blocks() -> None:
    """The storages that blocks keep are gone from the device while later blocks run."""
    blocks, held = make_blocks(5), []
    offload = ActivationOffload(CPU)
    offload.apply(blocks)
    saved: list[Any] = []
    pack = activation_offload._BlockActivations.pack

    def record(activations: Any, tensor: Tensor) -> Any:
        result = pack(activations, tensor)
        saved.append(result)
        moved = [s.storage for s in saved if isinstance(s, activation_offload._SavedTensor)]
        held.append(len({id(storage) for storage in moved if storage.tensor is not None}))
        return result

    with patch.object(activation_offload._BlockActivations, "pack", record):
        run_blocks(blocks)
    assert 3 < max(held) <= 2 * 3, "of five blocks that keep three tensors each"


def test_strides_and_values_of_views_come_back() -> None:
    """Kernels see the tensors that they saved, with gaps and in another order of memory."""
    seen: list[tuple[Tensor, Tensor]] = []

    class Observed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, view: Tensor) -> Tensor:
            ctx.save_for_backward(view)
            ctx.expected = (view.detach().clone(), view.stride(), view.storage_offset())
            return view.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (view,) = ctx.saved_tensors
            values, stride, offset = ctx.expected
            assert (view.stride(), view.storage_offset()) == (stride, offset)
            seen.append((view, values))
            return grad

    class ViewBlock(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = torch.cat((x, 2 * x), dim=1)
            return Observed.apply(wide[:, WIDTH:].t()).t() + Observed.apply(wide[::2, :WIDTH]).sum()  # type: ignore[no-untyped-call]

    blocks: list[nn.Module] = [ViewBlock() for _ in range(3)]
    recorder, recording = record_copies()
    ActivationOffload(CPU).apply(blocks)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with recording:
        h = x
        for block in blocks:
            h = block(h)
        h.sum().backward()  # type: ignore[no-untyped-call]
    assert len(seen) == 6 and all(torch.equal(view, values) for view, values in seen)
    assert recorder.sizes == [ROWS * 2 * WIDTH * 4] * 2, "two views of one storage are copied once"


def test_a_tensor_that_is_changed_in_place_is_refused() -> None:
    """As without offload: autograd refuses the backward pass then."""

    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = x * 2
            result = kept.sin()
            kept.add_(1)
            return result

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Changing()(x).sum().backward()
    blocks = [Changing(), Changing()]
    ActivationOffload(CPU).apply(blocks)
    with pytest.raises(ModelError, match="in place"):
        blocks[1](blocks[0](x)).sum().backward()


def test_evaluation_keeps_nothing() -> None:
    blocks, (recorder, recording) = make_blocks(3), record_copies()
    ActivationOffload(CPU).apply(blocks)
    with recording, torch.no_grad():
        h = torch.randn(ROWS, WIDTH)
        for block in blocks:
            h = block(h, torch.ones(WIDTH))
    assert not recorder.sizes


def run_steps(rank: int, rendezvous: Any, spec: Any) -> tuple[list[float], list[Tensor], int]:
    """Return losses and norms of two steps, the weights after them, and the number of copies to the host."""
    recorder, recording = record_copies()
    trainer = build_trainer(spec, rank, CPU, rendezvous, ControlChannel())
    with recording if spec.config.parallel.activation_offload != "none" else nullcontext():
        results = [trainer.train_step(step) for step in range(2)]
    weights = [
        (p.to_local() if hasattr(p, "to_local") else p).detach().clone()
        for p in trainer.model_step.model.parameters.values()
    ]
    return [value for r in results for value in (r.loss, r.grad_norm)], weights, len(recorder.sizes)


@pytest.mark.parametrize(("layout", "policy"), CASES)
def test_offload_keeps_the_bits(pool: WarmPool, layout: str, policy: str) -> None:
    words = [*(GPT2 if layout == "pp-2" else LLAMA), *WORDS, *LAYOUTS[layout], *RECOMPUTE[policy]]
    plain, offloaded = (
        pool.inspect_trainers(run_steps, make_small_config(None, *words, *more), build=False)
        for more in ([], [OFFLOAD])
    )
    for (numbers, weights, _), (expected, expected_weights, _) in zip(offloaded, plain, strict=True):
        assert numbers == expected
        assert all(torch.equal(weight, other) for weight, other in zip(weights, expected_weights, strict=True))
    assert all(copies > 0 for _, _, copies in offloaded)
