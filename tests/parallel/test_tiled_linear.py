"""Tiled linear layers under ZeRO-3: results and state equal those of one process; one tile is gathered at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import LayoutError
from tests.parallel.layout_run import BASE, MODELS, run_layout
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, prepare_run_on_cpu

LIMIT = 768 * 8  # bytes: in fp64, each weight of these models has two to five tiles, mostly of uneven sizes
TILED = [f"parallel.tile_mib={LIMIT / 2**20}"]
ZERO3 = ["cluster.workers=2", "parallel.zero=3"]
LAYOUTS = {
    "zero3-2, recompute": [*ZERO3, "parallel.activation_checkpointing=full"],
    "zero3-2 x tp-2": [*ZERO3, "cluster.workers=4", "parallel.tp=2"],
    "zero3-2 x pp-2, zbv": [
        *ZERO3,
        "cluster.workers=4",
        "parallel.pp=2",
        "parallel.pp_schedule=zbv",
        "model.num_layers=5",
    ],
}
CASES = [
    ("gpt2, six heads", "zero3-2 x tp-2"),
    ("llama", "zero3-2, recompute"),
    ("gpt2", "zero3-2 x pp-2, zbv"),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_tiling_equals_one_process(pool: WarmPool, tmp_path: Path, model: str, layout: str) -> None:
    words = [*MODELS[model], *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    expected, state = run_layout(pool, tmp_path / "alone", *words, steps=2)
    steps, result_state = run_layout(pool, tmp_path / "tiled", *words, *LAYOUTS[layout], *TILED, steps=2)
    for result, reference in zip(steps, expected, strict=True):
        assert result["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-12)
        assert result["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-11)
    assert result_state.keys() == state.keys()
    for name, tensor in state.items():
        bound = 1e-11 if name.startswith("1 optimizer.exp_avg.") else 1e-7
        scale = max(tensor.abs().max().item(), 1e-6)
        assert (result_state[name] - tensor).abs().max().item() <= bound * scale, name


def test_a_checkpoint_resumes_with_and_without_tiling(pool: WarmPool, tmp_path: Path) -> None:
    words = [*BASE, *MODELS["llama"], *ZERO3, "train.steps=3"]
    expected = [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words))[0])]
    losses = []
    for first, tiled in enumerate((TILED, [], TILED)):
        config = make_small_config(tmp_path, *words, *tiled)
        losses += get_step_metrics(pool.train(config, resume_step=first or None, steps_to=first + 1)[0])
    assert [step["train/loss"] for step in losses] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_one_tile_is_gathered_at_a_time(pool: WarmPool, tmp_path: Path, policy: str) -> None:
    words = [*BASE, *MODELS["llama"], *ZERO3, "train.micro_batch_size=6", f"parallel.activation_checkpointing={policy}"]
    untiled, tiled = (
        pool.call(observe_step, 2, make_small_config(tmp_path, *words, *tiling, "model.num_layers=1"))[0]
        for tiling in ([], TILED)
    )
    assert untiled["linear"] >= 65 * 32 * 8  # the head alone
    # Observed at each operation of a step: gathered weights, and FSDP2 buffers of current or just completed gathers.
    # While a block recomputes, the first tile of its backward pass is already gathered.
    assert tiled["tiles"] == 1 and 0 < tiled["linear"] <= LIMIT
    assert tiled["all"] <= (2 if policy == "none" else 3) * LIMIT < untiled["all"]
    assert tiled["left"] == 0
    assert tiled["gathers"] > 2 * untiled["gathers"]


def observe_step(rank: int, rendezvous: Any, config: Any) -> dict[str, int]:
    """Return the most that a step with one microbatch had gathered, by kind."""
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.runtime.worker_spec import WorkerSpec
    from raytrain_hpc.training.builder import build_trainer

    prepared = prepare_run_on_cpu(config)
    layout, batching = prepared.resolve_layout(2)
    spec = WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        model_spec=prepared.model_spec,
        dataset_hash=prepared.dataset.dataset_hash,
        custom=None,
        generation=1,
        resume_step=None,
        end_step=1,
    )
    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel())
    modules = trainer.model_step.model.modules.values()
    with GatherObserver([submodule for module in modules for submodule in module.modules()]) as observer:
        trainer.run(0, 1)
        observer.observe()
    return observer.peak | {"left": observer.current["tiles"]}


class GatherObserver(TorchDispatchMode):
    """Observes, at each operation, which weights have storage and which gather buffers are alive."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self._linear = [
            module for module in modules if getattr(module, "weight", None) is not None and module.weight.ndim == 2
        ]
        self._linear = [module for module in self._linear if "Embedding" not in type(module).__name__]
        self._root = 0
        self._buffers: list[weakref.ref[torch.Tensor]] = []
        self.current: dict[str, int] = {}
        self.peak = {"tiles": 0, "linear": 0, "buffers": 0, "all": 0, "gathers": 0}

    def observe(self) -> None:
        sizes = [
            module.weight.untyped_storage().size() for module in self._linear if not hasattr(module.weight, "to_local")
        ]
        self._buffers = [ref for ref in self._buffers if ref() is not None]
        buffer_bytes = sum(ref().untyped_storage().size() for ref in self._buffers)
        self.current = {
            "tiles": sum(size > 0 for size in sizes),
            "linear": sum(sizes),
            "buffers": buffer_bytes,
            "all": sum(sizes) + buffer_bytes,
        }
        self.peak |= {key: max(self.peak[key], size) for key, size in self.current.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.observe()
        if "allgather" in str(func):
            self._root = self._root or args[0].nbytes  # the first gather is that of the root module, which is not tiled
            if args[0].nbytes != self._root:
                self.peak["gathers"] += 1
                self._buffers.append(weakref.ref(args[0]))
        return func(*args, **(kwargs or {}))


def test_tiling_without_zero_3_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(
            make_small_config(tmp_path, "cluster.workers=2", "parallel.zero=2", "parallel.tile_mib=64"), None, print
        )
    assert "parallel.tile_mib=64" in str(refused.value) and "parallel.zero=3" in str(refused.value)
    prepare_run(make_small_config(tmp_path, *ZERO3, "parallel.tile_mib=64"), None, print)
