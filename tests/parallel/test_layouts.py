"""Losses, norms, gradients and weights of every layout equal those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import LayoutError
from raytrain_hpc.text_generation import load_model
from tests.parallel.layout_run import BASE, MODELS, STEPS, load_full_state, run_layout
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config


def deep(pp: int) -> list[str]:
    """Return the settings of a pipeline whose stages do not divide the layers evenly."""
    return [f"parallel.pp={pp}", "model.num_layers=5"]


LAYOUTS = {
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "tp-3": ["cluster.workers=3", "parallel.tp=3"],
    "tp-4": ["cluster.workers=4", "parallel.tp=4"],
    "dp-2 x tp-2": ["cluster.workers=4", "parallel.tp=2"],
    "zero1-2 x tp-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=1"],
    "zero3-2 x tp-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "ring-2": ["cluster.workers=2", "parallel.cp=2"],
    "ring-3": ["cluster.workers=3", "parallel.cp=3"],
    "ring-4": ["cluster.workers=4", "parallel.cp=4"],
    "ulysses-2": ["cluster.workers=2", "parallel.cp=2", "parallel.ulysses=2"],
    "ulysses-3": ["cluster.workers=3", "parallel.cp=3", "parallel.ulysses=3"],
    "ulysses-4": ["cluster.workers=4", "parallel.cp=4", "parallel.ulysses=4"],
    "ring-2 x ulysses-2": ["cluster.workers=4", "parallel.cp=4", "parallel.ulysses=2"],
    "dp-2 x ring-2": ["cluster.workers=4", "parallel.cp=2"],
    "zero3-2 x ring-2": ["cluster.workers=4", "parallel.cp=2", "parallel.zero=3"],
    "ring-2 x tp-2": ["cluster.workers=4", "parallel.cp=2", "parallel.tp=2"],
    "ulysses-2 x tp-2": ["cluster.workers=4", "parallel.cp=2", "parallel.ulysses=2", "parallel.tp=2"],
}
LAYOUTS |= {
    "pp-2": ["cluster.workers=2", *deep(2)],
    "pp-4, gpipe": ["cluster.workers=4", *deep(4), "parallel.pp_schedule=gpipe"],
    "pp-2 x tp-2, zbv": ["cluster.workers=4", *deep(2), "parallel.tp=2", "parallel.pp_schedule=zbv"],
    "zero3-2 x pp-2, zbv": ["cluster.workers=4", *deep(2), "parallel.zero=3", "parallel.pp_schedule=zbv"],
    "zero1-2 x pp-2, interleaved": [
        "cluster.workers=4",
        *deep(2),
        "parallel.zero=1",
        "parallel.pp_schedule=interleaved_1f1b",
    ],
    "ring-2 x pp-2, interleaved zero bubble": [
        "cluster.workers=4",
        *deep(2),
        "parallel.cp=2",
        "parallel.pp_schedule=interleaved_zero_bubble",
    ],
    "ep-3": ["cluster.workers=3", "parallel.ep=3"],
    "ep-2 x tp-2": ["cluster.workers=4", "parallel.ep=2", "parallel.tp=2"],
    "zero3-4, ep-2": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=3"],
    "zero2-2 x pp-2, ep-2": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=2", *deep(2)],
    "ring-2, ep-2": ["cluster.workers=2", "parallel.cp=2", "parallel.ep=2"],
}
CASES = [
    ("gpt2", "tp-2"),
    ("gpt2", "ring-2"),
    ("gpt2", "ulysses-2"),
    ("gpt2", "zero1-2 x tp-2"),
    ("gpt2, six heads", "tp-4"),
    ("gpt2, six heads", "ring-3"),
    ("gpt2, six heads", "ulysses-4"),
    ("llama", "tp-3"),
    ("llama", "tp-4"),
    ("llama", "ring-4"),
    ("llama", "ulysses-3"),
    ("qwen3", "tp-2"),
    ("qwen3", "tp-3"),
    ("qwen3", "ulysses-2 x tp-2"),
    ("qwen3", "zero3-2 x pp-2, zbv"),
    ("llama, two groups of three", "tp-2"),
    ("llama, two groups of three", "tp-4"),
    ("llama, two groups of three", "ulysses-4"),
    ("llama, five tokens", "tp-4"),
    ("llama, three tokens", "tp-4"),
    ("llama, three tokens", "zero3-2 x tp-2"),
    ("llama, 50257 tokens", "tp-2"),
    ("llama, 50257 tokens", "tp-4"),
]
CASES += [("gpt2", "zero3-2 x pp-2, zbv"), ("gpt2", "pp-4, gpipe")]
CASES += [("moe", layout) for layout in LAYOUTS if "ep-" in layout]
CASES += [("moe, bias", layout) for layout in ("ep-3", "ring-2, ep-2", "ep-2 x tp-2")]
CASES += [("llama", layout) for layout in LAYOUTS if (" x " in layout or "pp-" in layout) and "ep-" not in layout]


@pytest.fixture(scope="module")
def single_rank_run(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory):
    results = {}

    def run_single_rank(model: str, layout: str = ""):
        words = (*MODELS[model], *(word for word in LAYOUTS.get(layout, []) if word.startswith("model.")))
        if words not in results:
            results[words] = run_layout(pool, tmp_path_factory.mktemp("single"), *words)
        return results[words]

    return run_single_rank


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layout_equals_one_process(pool: WarmPool, single_rank_run, tmp_path: Path, model: str, layout: str) -> None:
    expected, state = single_rank_run(model, layout)
    steps, result_state = run_layout(pool, tmp_path, *MODELS[model], *LAYOUTS[layout])
    for result, reference in zip(steps, expected, strict=True):
        assert result["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-12)
        assert result["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-11)
    assert steps[-1]["val/loss"] == pytest.approx(expected[-1]["val/loss"], rel=1e-12)
    assert result_state.keys() == state.keys() and len(steps) == STEPS
    # After one step the first moment is a tenth of the clipped gradient. Where a gradient is nearly zero, rounding can
    # flip the sign of the Adam update, so weights have a wider bound.
    for name, tensor in state.items():
        bound = 1e-11 if name.startswith("1 optimizer.exp_avg.") else 1e-7
        scale = max(tensor.abs().max().item(), 1e-6)
        assert (result_state[name] - tensor).abs().max().item() <= bound * scale, name


def test_frozen_routers_keep_their_bias_on_every_layout(pool: WarmPool, tmp_path: Path) -> None:
    """Below what is trained in one process, and behind what another stage of a pipeline sends."""
    patterns = ["embedding.*", "positions.*", "layers.[012].*"]
    groups = ", ".join(f"{{pattern: '{pattern}', frozen: true}}" for pattern in patterns)
    words = [*MODELS["moe, bias"], "model.num_layers=4", f"optimizer.groups=[{groups}]", "model.expert_bias_rate=0.1"]
    _, expected = run_layout(pool, tmp_path / "alone", *words, "cluster.workers=1")
    _, state = run_layout(pool, tmp_path / "pp", *words, "cluster.workers=2", "parallel.pp=2")
    has_moved = [bool(expected[f"1 model.layers.{layer}.mlp.router.bias"].any()) for layer in range(4)]
    assert has_moved == [False, False, False, True]
    for name, tensor in expected.items():
        assert torch.allclose(state[name], tensor, rtol=1e-7, atol=1e-12), name


@pytest.mark.parametrize(
    ("layout", "policy"), [("tp-2", "selective"), ("ring-2 x tp-2", "full"), ("ring-2 x ulysses-2", "selective")]
)
def test_activation_checkpointing_keeps_the_losses(pool: WarmPool, single_rank_run, layout: str, policy: str) -> None:
    words = [*BASE, *MODELS["llama"], *LAYOUTS[layout], f"parallel.activation_checkpointing={policy}"]
    assert train_losses(pool, *words) == pytest.approx(
        [step["train/loss"] for step in single_rank_run("llama")[0]], rel=1e-12
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "tp-2"),
        ("llama", "ring-2"),
        ("llama", "ulysses-2 x tp-2"),
        ("llama", "zero3-2 x pp-2, zbv"),
        ("moe", "zero2-2 x pp-2, ep-2"),
    ],
)
def test_bf16_losses_stay_close_to_fp64(pool: WarmPool, single_rank_run, model: str, layout: str) -> None:
    bf16_losses = train_losses(pool, *BASE, *MODELS[model], *LAYOUTS[layout], "train.dtype=bf16")
    assert bf16_losses == pytest.approx([step["train/loss"] for step in single_rank_run(model, layout)[0]], rel=5e-3)


def train_losses(pool: WarmPool, *words: str) -> list[float]:
    return [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words))[0])]


def test_a_checkpoint_resumes_on_another_layout(pool: WarmPool, tmp_path: Path) -> None:
    words = [*BASE, *MODELS["llama"], "train.steps=4"]
    expected = train_losses(pool, *words)
    for first, layout in enumerate(("tp-4", "ring-2 x ulysses-2", "zero3-2 x tp-2", "ring-3")):
        config = make_small_config(tmp_path, *words, *LAYOUTS[layout])
        steps = get_step_metrics(pool.train(config, resume_step=first or None, steps_to=first + 1)[0])
        assert [s["train/loss"] for s in steps] == pytest.approx(expected[first : first + 1], rel=1e-12)


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (
            ["parallel.tp=4", "model.num_heads=2"],
            "tp=4",
            "2 attention heads, and this layout needs at least 4",
        ),
        (["parallel.tp=4", "train.seq_len=3"], "tp=4", "there are 3 positions in a sequence"),
        (["parallel.tp=3"], "tp=3", "must divide the 4 workers"),
        (
            ["parallel.cp=4", "train.seq_len=7"],
            "cp=4",
            "7 positions in a sequence, and this layout needs at least 8",
        ),
        (["parallel.cp=4", "parallel.ulysses=3"], "ulysses=3", "must divide cp=4"),
        (
            ["parallel.cp=4", "parallel.ulysses=4", "model.num_heads=2"],
            "ulysses=4",
            "there are 2 attention heads on each of 1 tensor-parallel ranks",
        ),
        (["parallel.tp=2", "parallel.cp=4"], "cp=4", "must divide the 2 workers that tp=2 leaves"),
    ],
)
def test_layouts_that_leave_a_rank_empty_are_refused(tmp_path: Path, words: list[str], key: str, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(make_small_config(tmp_path, "cluster.workers=4", *words), None, print)
    assert message in str(refused.value) and f"parallel.{key}" in str(refused.value)


def test_sampling_uses_the_trained_expert_bias(pool: WarmPool, tmp_path: Path) -> None:
    words = [
        *MODELS["moe, bias"],
        "model.expert_bias_rate=0.5",
        "train.steps=3",
        "train.dtype=fp64",
        "cluster.workers=3",
        "parallel.ep=3",
    ]
    pool.train(make_small_config(tmp_path, *words))
    decoder, _ = load_model(RunDirectory(tmp_path))
    saved = load_full_state(tmp_path, 3)
    for name, buffer in decoder.named_buffers():
        if name.endswith("bias"):
            assert buffer.abs().max() >= 0.5 and torch.equal(buffer.double(), saved[f"model.{name}"])
        else:
            assert not buffer.any()
