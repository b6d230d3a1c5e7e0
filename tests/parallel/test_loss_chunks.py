"""The loss in chunks of positions: equal to the loss of whole logits on every layout, with a fraction of the memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from raytrain_hpc.model.cross_entropy import ChunkedLoss, VocabularyShard
from raytrain_hpc.parallel.loss_chunks import CompiledCrossEntropy
from tests.parallel.layout_run import MODELS, run_layout
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

LAYOUTS = {
    "one process": ["cluster.workers=1"],
    "ddp-3": ["cluster.workers=3"],
    "tp-3": ["cluster.workers=3", "parallel.tp=3"],
    "tp-2 x zero3-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "ring-2": ["cluster.workers=2", "parallel.cp=2"],
    "zero2-2 x pp-2, zbv": [
        *("cluster.workers=4", "parallel.pp=2", "parallel.zero=2", "parallel.pp_schedule=zbv"),
        "model.num_layers=5",
    ],
    "zero3-2, tiles": ["cluster.workers=2", "parallel.zero=3", "parallel.tile_mib=0.004"],
}


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 100])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_values_and_gradients_equal_those_of_whole_logits(num_chunks: int, is_frozen: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64, requires_grad=not is_frozen)
    targets = torch.randint(0, 11, (2, 7), generator=generator)
    targets[0, :3] = -100
    inputs = [x] if is_frozen else [x, weight]
    expected = F.cross_entropy((x @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = ChunkedLoss(num_chunks)(x, weight, targets)
    torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    for actual, wanted in zip(
        torch.autograd.grad(loss * 3.0, inputs), torch.autograd.grad(expected * 3.0, inputs), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-14)
    with torch.no_grad():
        assert ChunkedLoss(num_chunks)(x, weight, targets) == loss.detach()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.bfloat16, 1e-2)])
def test_compiled_chunks_equal_whole_logits(
    monkeypatch: pytest.MonkeyPatch, num_shards: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Columns beyond the rows of a shard are padding. 8 rows on 3 shards: the last one has fewer."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))  # C++ takes seconds per function
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(10, 8, generator=generator, dtype=dtype).mul(3)
    targets = torch.randint(0, 8, (10,), generator=generator)
    targets[2], logits[5] = -100, 1000 + logits[5]
    whole = logits.double().requires_grad_()
    expected = F.cross_entropy(whole, targets, reduction="sum")
    expected.backward()
    bounds = [0, 8] if num_shards == 1 else [0, 3, 6, 8]
    ranges = [range(*pair) for pair in pairwise(bounds)]
    reduction = ReductionOfThreads(num_shards)

    def compute(rows: range) -> tuple[torch.Tensor, torch.Tensor | None]:
        shard = None if num_shards == 1 else VocabularyShard(rows, reduction.max, reduction.sum)
        local = F.pad(logits[:, rows.start : rows.stop], (0, 2), value=7.0)
        return compiled(local, targets, len(rows), shard, needs_grad=True)

    compiled = CompiledCrossEntropy()
    with ThreadPoolExecutor(num_shards) as executor:
        results = list(executor.map(compute, ranges))
    for rows, (loss, grad) in zip(ranges, results, strict=True):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13 if dtype == torch.float64 else 1e-6)
        assert grad is not None and grad.dtype == dtype and not grad[:, len(rows) :].any()
        difference = grad[:, : len(rows)] - whole.grad[:, rows.start : rows.stop]
        assert difference.abs().max() <= tolerance
    loss, grad = CompiledCrossEntropy()(logits, targets, 8, None, needs_grad=False)
    assert grad is None and loss.item() == pytest.approx(expected.item(), rel=1e-6)


class ReductionOfThreads:
    """Reductions over threads, each of which stands for a rank."""

    def __init__(self, size: int):
        self._barrier, self._inputs = threading.Barrier(size), list[torch.Tensor]()

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the maximum over threads."""
        return self._reduce(x, lambda inputs: inputs.amax(0))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over threads."""
        return self._reduce(x, lambda inputs: inputs.sum(0))

    def _reduce(self, x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        self._inputs.append(x)
        self._barrier.wait(60)
        result = function(torch.stack(self._inputs))
        if self._barrier.wait(60) == 0:
            self._inputs.clear()
        self._barrier.wait(60)
        return result


def test_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((1, 5, 4), (9, 4)))
    targets = torch.tensor([[3, 8, -100, 0, 3]])
    x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: ChunkedLoss(3)(x, w, targets), (x, weight))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_every_layout_equals_whole_logits_in_one_process(
    pool: WarmPool, tmp_path: Path, model: str, layout: str
) -> None:
    words = [*MODELS[model], *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    expected, state = run_layout(pool, tmp_path / "whole", *words)
    metrics, actual = run_layout(pool, tmp_path / "chunks", *words, *LAYOUTS[layout], "train.loss_chunks=4")
    for step, reference in zip(metrics, expected, strict=True):
        assert step["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-12)
        assert step["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-11)
    assert metrics[-1]["val/loss"] == pytest.approx(expected[-1]["val/loss"], rel=1e-12)
    for name, tensor in state.items():
        bound = (1e-11 if name.startswith("1 optimizer.exp_avg.") else 1e-7) * max(tensor.abs().max().item(), 1e-6)
        assert (actual[name] - tensor).abs().max().item() <= bound, name


@pytest.mark.parametrize(
    "words",
    [
        ["train.dtype=bf16"],
        ["train.dtype=bf16", "parallel.zero=3"],
        ["train.dtype=float8", "train.float8_head=true", "parallel.tp=2"],  # scales are those of chunks
        ["lora.rank=2"],
    ],
)
def test_losses_stay_close_to_those_of_whole_logits(pool: WarmPool, words: list[str]) -> None:
    base = [*MODELS["llama"], "cluster.workers=2", "train.micro_batch_size=3", *words]
    whole, chunked = (
        [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *base, *extra))[0])]
        for extra in ([], ["train.loss_chunks=3"])
    )
    assert chunked == pytest.approx(whole, rel=1e-6 if "lora" in words[0] else 3e-4)


def measure_peak_bytes(num_chunks: int) -> int:
    """Return the most bytes of tensors that one pass has allocated beyond its inputs, by torch's profiler."""
    x = torch.randn(1, 256, 16, requires_grad=True)
    weight = torch.randn(5000, 16, requires_grad=True)
    targets = torch.randint(0, 5000, (1, 256))
    with torch.profiler.profile(profile_memory=True) as profile:
        ChunkedLoss(num_chunks)(x, weight, targets).backward()
    total = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total)
    return peak


def test_only_the_logits_of_a_chunk_are_in_memory() -> None:
    logits_bytes = 256 * 5000 * 4
    whole, chunked = measure_peak_bytes(1), measure_peak_bytes(8)
    assert whole > 1.9 * logits_bytes
    assert chunked < 0.4 * logits_bytes, "two chunks of an eighth, and the gradient of the weights, a sixteenth"
