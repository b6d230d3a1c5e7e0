"""Runs on a GPU in this process: what callbacks record there, own data and scripts, and the bf16 products of Muon."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import image_classifier
from raytrain_hpc import MemorySnapshot, NvtxRanges
from raytrain_hpc.api import train
from raytrain_hpc.optim.newton_schulz import orthogonalize, orthogonalize_each
from raytrain_hpc.training import sample_loader
from tests.examples import sharded_scripts
from tests.examples.test_elastic_scripts import KEYS, WORDS
from tests.examples.test_sharded_scripts import read_metrics, run_attached
from tests.warm_pool import make_small_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ON_GPU = ["cluster.workers=0", "cluster.device=cuda"]
IMAGES = [
    "train.dtype=fp32",
    "train.steps=12",
    "train.global_batch_size=32",
    "train.micro_batch_size=8",
    "eval.samples=40",
]


def get_losses(directory: Path) -> list[float]:
    return [step["train/loss"] for step in read_metrics(directory)]


def test_memory_history_and_ranges_of_real_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push, pop, calls = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop, []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(name) or push(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append(None) or pop())
    train(make_small_config(tmp_path, *ON_GPU), callbacks=[MemorySnapshot([1, 3]), NvtxRanges()], quiet=True)
    snapshot = pickle.loads((tmp_path / "memory" / "rank-00000-step-00000003.pickle").read_bytes())
    actions = {entry["action"] for trace in snapshot["device_traces"] for entry in trace}
    assert snapshot["segments"] and {"alloc", "free_completed"} <= actions
    step = ["forward_backward", None, "reduce", None, "optimizer", None, None]
    assert calls == [name for number in range(1, 6) for name in (f"step {number}", *step)]


def test_own_samples_are_pinned_and_give_the_losses_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    to_batch, pinned = sample_loader.to_batch, []

    def record_pinning(content: Any, samples: Any, device: torch.device) -> Any:
        pinned.append(content["image"].is_pinned())
        return to_batch(content, samples, device)

    monkeypatch.setattr(sample_loader, "to_batch", record_pinning)
    dataset = image_classifier.Images(200, seed=0, noise=1.0, augment=True)
    parts = {"model": image_classifier.build, "loss": image_classifier.loss, "dataset": dataset, "quiet": True}
    losses = {}
    for device, readers in (("cuda", 2), ("cuda", 0), ("cpu", 0)):
        directory = tmp_path / f"{device}-{readers}"
        words = [*IMAGES, "cluster.workers=0", f"cluster.device={device}", f"data.num_readers={readers}"]
        train(make_small_config(directory, *words), **parts)
        losses[device, readers] = get_losses(directory)
        assert any(pinned) is (readers > 0)  # those of readers; validation reads in this process
        pinned.clear()
    assert losses["cuda", 2] == losses["cuda", 0] == pytest.approx(losses["cpu", 0], rel=1e-4)


def test_an_elastic_script_draws_the_same_numbers_again(tmp_path: Path) -> None:
    """Dropout and noise come from the generator of the GPU, which is seeded for each microbatch."""
    runs = [
        run_attached(tmp_path / name, sharded_scripts.ELASTIC, 9, *WORDS, *ON_GPU, f"run.seed={seed}")
        for name, seed in (("first", 0), ("second", 0), ("other", 1))
    ]
    first, second, other = ([[step.get(key) for key in KEYS] for step in run] for run in runs)
    assert first == second and first != other


@pytest.mark.parametrize("shape", [(5, 96, 160), (3, 200, 64), (1, 1, 40)])
def test_orthogonalization_in_bf16_keeps_the_directions_of_fp64(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = orthogonalize(matrices)
    result = orthogonalize(matrices.to("cuda", torch.bfloat16)).double().cpu()
    assert float((result - expected).norm() / expected.norm()) < 3e-2
    each = [matrix.to("cuda", torch.bfloat16) for matrix in matrices]
    orthogonalize_each(each, batched=True)
    assert float((torch.stack(each).double().cpu() - expected).norm() / expected.norm()) < 3e-2


def test_muon_in_bf16_learns_like_fp32(tmp_path: Path) -> None:
    words = [*ON_GPU, "optimizer.name=muon", "train.steps=30", "optimizer.lr=3e-3"]
    train(make_small_config(tmp_path / "fp32", *words, "train.deterministic=elastic"), quiet=True)  # products in fp32
    train(make_small_config(tmp_path / "bf16", *words, "train.dtype=bf16"), quiet=True)
    wide, narrow = (get_losses(tmp_path / name) for name in ("fp32", "bf16"))
    assert narrow == pytest.approx(wide, rel=2e-3) and wide[-1] < wide[0] - 0.02
