"""Tiled matrices under ZeRO-3: the numbers and the state of one process, and a tile gathered at a time."""

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
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

LIMIT = 768 * 8  # bytes: in fp64 every matrix of these models is cut into two to five tiles, mostly unevenly
TILED = [f"parallel.tile_mib={LIMIT / 2**20}"]
ZERO3 = ["cluster.workers=2", "parallel.zero=3"]
LAYOUTS = {
    "zero3-2, recompute": [*ZERO3, "parallel.recompute=full"],
    "zero3-2 x tp-2": [*ZERO3, "cluster.workers=4", "parallel.tp=2"],
    "zero3-2 x pp-2, zbv": [
        *ZERO3,
        "cluster.workers=4",
        "parallel.pp=2",
        "parallel.schedule=zbv",
        "model.num_layers=5",
    ],
}
CASES = [
    ("gpt2, six heads", "zero3-2 x tp-2"),
    ("llama", "zero3-2, recompute"),
    ("gpt2", "zero3-2 x pp-2, zbv"),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_all_numbers_are_those_of_one_process(pool: WarmPool, tmp_path: Path, model: str, layout: str) -> None:
    words = [*MODELS[model], *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    expected, state = run_layout(pool, tmp_path / "alone", *words, steps=2)
    steps, mine = run_layout(pool, tmp_path / "tiled", *words, *LAYOUTS[layout], *TILED, steps=2)
    for here, there in zip(steps, expected, strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-12)
        assert here["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-11)
    assert mine.keys() == state.keys()
    for name, tensor in state.items():
        bound = 1e-11 if name.startswith("1 optimizer.exp_avg.") else 1e-7
        scale = max(tensor.abs().max().item(), 1e-6)
        assert (mine[name] - tensor).abs().max().item() <= bound * scale, name


def test_a_checkpoint_is_the_same_tiled_and_untiled(pool: WarmPool, tmp_path: Path) -> None:
    words = [*BASE, *MODELS["llama"], *ZERO3, "train.steps=3"]
    expected = [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words))[0])]
    losses = []
    for first, tiled in enumerate((TILED, [], TILED)):
        config = make_small_config(tmp_path, *words, *tiled)
        losses += get_step_metrics(pool.train(config, resume_step=first or None, steps_to=first + 1)[0])
    assert [step["train/loss"] for step in losses] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_one_tile_is_gathered_at_a_time(pool: WarmPool, tmp_path: Path, policy: str) -> None:
    words = [*BASE, *MODELS["llama"], *ZERO3, "train.micro_batch=6", f"parallel.recompute={policy}"]
    whole, tiled = (
        pool.call(watched_step, 2, make_small_config(tmp_path, *words, *more, "model.num_layers=1"))[0]
        for more in ([], TILED)
    )
    assert whole["linear"] >= 65 * 32 * 8  # the head alone
    # Observed at every operation of a step: weights in place, and FSDP2's buffers of gathers begun or just done. A
    # block that recomputes has the tile gathered already that its backward pass begins with.
    assert tiled["tiles"] == 1 and 0 < tiled["linear"] <= LIMIT
    assert tiled["all"] <= (2 if policy == "none" else 3) * LIMIT < whole["all"]
    assert tiled["left"] == 0
    assert tiled["gathers"] > 2 * whole["gathers"]


def watched_step(rank: int, meeting: Any, config: Any) -> dict[str, int]:
    """What a step with one microbatch had gathered at most."""
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.runtime.worker_spec import WorkerSpec
    from raytrain_hpc.training.builder import build_trainer

    prepared = prepare_run(config, None, lambda line: None)
    layout, batching = prepared.resolve_layout(2)
    spec = WorkerSpec(
        config=config,
        layout=layout,
        batching=batching,
        model_spec=prepared.model_spec,
        custom=None,
        generation=1,
        resume_step=None,
        end_step=1,
    )
    trainer = build_trainer(spec, rank, torch.device("cpu"), meeting, ControlChannel())
    modules = trainer.model_step.model.modules.values()
    with Watch([part for module in modules for part in module.modules()]) as watch:
        trainer.run(0, 1)
        watch.look()
    return watch.peak | {"left": watch.now["tiles"]}


class Watch(TorchDispatchMode):
    """Looks, at every operation, at which weights of matrices have storage and which gathered buffers live."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self._linear = [part for part in parts if getattr(part, "weight", None) is not None and part.weight.ndim == 2]
        self._linear = [part for part in self._linear if "Embedding" not in type(part).__name__]
        self._root = 0
        self._buffers: list[weakref.ref[torch.Tensor]] = []
        self.now: dict[str, int] = {}
        self.peak = {"tiles": 0, "linear": 0, "buffers": 0, "all": 0, "gathers": 0}

    def look(self) -> None:
        sizes = [part.weight.untyped_storage().size() for part in self._linear if not hasattr(part.weight, "to_local")]
        self._buffers = [ref for ref in self._buffers if ref() is not None]
        alive = sum(ref().untyped_storage().size() for ref in self._buffers)
        self.now = {
            "tiles": sum(size > 0 for size in sizes),
            "linear": sum(sizes),
            "buffers": alive,
            "all": sum(sizes) + alive,
        }
        self.peak |= {key: max(self.peak[key], size) for key, size in self.now.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.look()
        if "allgather" in str(func):
            self._root = self._root or args[0].nbytes  # what is never tiled, with the embedding, comes first
            if args[0].nbytes != self._root:
                self.peak["gathers"] += 1
                self._buffers.append(weakref.ref(args[0]))
        return func(*args, **(kwargs or {}))


def test_tiles_without_gathers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(
            make_small_config(tmp_path, "cluster.workers=2", "parallel.zero=2", "parallel.tile_mib=64"), None, print
        )
    assert "parallel.tile_mib=64" in str(refused.value) and "parallel.zero=3" in str(refused.value)
    with pytest.raises(LayoutError, match=r"train\.compile=false"):
        prepare_run(make_small_config(tmp_path, *ZERO3, "parallel.tile_mib=64", "train.compile=true"), None, print)
    prepare_run(make_small_config(tmp_path, *ZERO3, "parallel.tile_mib=64"), None, print)
