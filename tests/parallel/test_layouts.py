"""A layout is no numerical choice: losses, norms, gradients and weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_hpc.driver.preparation import prepare_run
from raytrain_hpc.errors import LayoutError
from tests.parallel.numbers import BASE, MODELS, run
from tests.pool import WarmPool, small, steps_of

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
SIX = ("gpt2, six heads", "llama, two groups of three")
CASES = [(model, layout) for model in MODELS for layout in ("tp-2", "ring-2", "ulysses-2")]
CASES += [(model, layout) for model in SIX for layout in ("tp-3", "ring-3", "ulysses-3", "tp-4", "ulysses-4")]
CASES += [
    ("llama, five tokens", "tp-4"),
    ("gpt2", "zero1-2 x tp-2"),
    ("llama", "ring-4"),
    ("gpt2", "ring-2 x ulysses-2"),
]
CASES += [("llama", layout) for layout in LAYOUTS if " x " in layout and "zero1" not in layout]


@pytest.fixture(scope="module")
def alone(pool: WarmPool, tmp_path_factory: pytest.TempPathFactory):
    made = {}

    def of(model: str):
        if model not in made:
            made[model] = run(pool, tmp_path_factory.mktemp("alone"), *MODELS[model])
        return made[model]

    return of


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_all_numbers_are_those_of_one_process(pool: WarmPool, alone, tmp_path: Path, model: str, layout: str) -> None:
    expected, state = alone(model)
    steps, mine = run(pool, tmp_path, *MODELS[model], *LAYOUTS[layout])
    for here, there in zip(steps, expected, strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-12)
        assert here["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-11)
    assert steps[-1]["val/loss"] == pytest.approx(expected[-1]["val/loss"], rel=1e-12)
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert mine.keys() == state.keys()
    # After one step the first moment is a tenth of the clipped gradient. Adam turns rounding into sign flips where a
    # gradient is all but zero, so the weights have a wider bound.
    for name, tensor in state.items():
        bound = 1e-11 if name.startswith("1 optimizer.exp_avg.") else 1e-7
        scale = max(tensor.abs().max().item(), 1e-6)
        assert (mine[name] - tensor).abs().max().item() <= bound * scale, name


def test_recompute_and_bf16_under_tensor_parallelism(pool: WarmPool, alone, tmp_path: Path) -> None:
    expected = [step["train/loss"] for step in alone("llama")[0]]
    for policy in ("selective", "full"):
        words = [*MODELS["llama"], *LAYOUTS["tp-2"], f"parallel.recompute={policy}"]
        assert [s["train/loss"] for s in run(pool, tmp_path / policy, *words)[0]] == pytest.approx(expected, rel=1e-12)
    rounded = steps_of(pool.train(small(None, *BASE, *MODELS["llama"], *LAYOUTS["tp-2"], "train.dtype=bf16"))[0])
    assert [s["train/loss"] for s in rounded] == pytest.approx(expected, rel=2e-2)


def test_a_checkpoint_of_one_layout_continues_on_another(pool: WarmPool, alone, tmp_path: Path) -> None:
    expected = [step["train/loss"] for step in alone("llama")[0]]
    words, first, last = [*BASE, *MODELS["llama"], "checkpoint.every=5"], 0, 5
    for layout in ("tp-4", "zero3-2 x tp-2", "tp-3", "dp-2 x tp-2"):
        config = small(tmp_path, *words, *LAYOUTS[layout])
        steps = steps_of(pool.train(config, resume_step=first or None, steps_to=last)[0])
        assert [s["train/loss"] for s in steps] == pytest.approx(expected[first:last], rel=1e-12)
        first, last = last, last + 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["model.num_heads=2"], "4 (command line): the model has 2 attention heads, and every rank needs one"),
        (["train.seq_len=3"], "the model has 3 positions in a sequence"),
        (["cluster.workers=6"], "must divide the 6 workers"),
    ],
)
def test_a_rank_without_a_part_of_the_model_is_refused(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(LayoutError) as refused:
        prepare_run(small(tmp_path, *LAYOUTS["tp-4"], *words), None, print)
    assert said in str(refused.value) and "parallel.tp" in str(refused.value)
