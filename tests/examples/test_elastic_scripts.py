"""Scripts with `train.deterministic=elastic`: the same bits on any number of ranks, sharded or not, with a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_hpc.errors import ModelError
from tests.examples import sharded_scripts as scripts
from tests.examples.test_sharded_scripts import run_attached

WORDS = ["train.deterministic=elastic", "train.global_batch_size=12", "train.micro_batch_size=2"]
KEYS = ("train/loss", "train/grad_norm", "train/tokens", "critic/before", "norm", "running")
LAYOUTS = {
    "ddp-2": ["cluster.workers=2", "fault.inject=[{kind: kill, rank: 1, step: 6}]"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3", "fault.inject=[{kind: kill, rank: 2, step: 5}]"],
    "hsdp-2x2": ["cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[list[float | None]]:
    """Return the metrics of one process."""
    return run_elastic(tmp_path_factory.mktemp("single"), "cluster.workers=0")


def run_elastic(directory: Path, *words: str) -> list[list[float | None]]:
    metrics = run_attached(directory, scripts.ELASTIC, 9, *WORDS, *words)
    values = [[step.get(key) for key in KEYS] for step in metrics]
    assert not any(value is None for value in values[3]), "step 4 has all of them"
    assert [step["train/tokens"] for step in metrics] == list(range(12, 120, 12))
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_has_the_bits_of_one_process(
    ray_cluster: None, single: list[list[float | None]], tmp_path: Path, layout: str
) -> None:
    """Dropout, noise, augmentation, running statistics, power iteration, two losses, clipping; uneven microbatches."""
    assert run_elastic(tmp_path, *LAYOUTS[layout]) == single


def test_several_ranks_are_near_one_without_elastic(ray_cluster: None, tmp_path: Path) -> None:
    """The sums of microbatches, also of uneven ones, are those of the plain script; here without random numbers."""
    template, _, parts, _ = scripts.LANGUAGE_MODEL, None, scripts.ATTACHED_PARTS, None
    source = template.format(**parts)
    split = source.replace(
        "        x, y = run.local_batch(get_batch())\n        loss = model(x, y) / accumulation\n"
        "        loss = run.backward(scaler.scale(loss))\n        total += loss.item()\n",
        "        for x, y in run.microbatches(run.local_batch(get_batch())):\n"
        "            loss = run.backward(scaler.scale(model(x, y) / accumulation))\n    total = run.loss\n",
    )
    assert split != source
    whole = run_attached(tmp_path / "whole", source, 12, "cluster.workers=0")
    words = ["cluster.workers=3", "parallel.zero=2", "train.global_batch_size=15", "train.micro_batch_size=3"]
    divided = run_attached(tmp_path / "divided", split, 12, *words)
    for key in ("train/loss", "train/grad_norm"):
        assert [step[key] for step in divided] == pytest.approx([step[key] for step in whole], rel=1e-5)


MISTAKES = {
    "call backward inside of": "run.backward(model(run.local_batch(torch.zeros(12, 2))).sum())",
    "a batch of 11 rows, but train.global_batch_size=12": "run.local_batch(torch.zeros(11, 2))",
    "backward was called twice": (
        "for x in run.microbatches(run.local_batch(torch.zeros(12, 2))): run.backward(model(x).mean()); "
        "run.backward(model(x).mean())"
    ),
    "backward was not called for a microbatch": "for x in run.microbatches(run.local_batch(torch.zeros(12, 2))): pass",
    "12 rows|4 rows, but this rank has 12": "list(run.microbatches(run.local_batch(torch.zeros(12, 2))[:4]))",
    "a parameter is not one of an attached": "run.clip_grad_norm_([torch.nn.Parameter(torch.zeros(2))], 1.0)",
}


@pytest.mark.parametrize("reason", MISTAKES)
def test_mistakes_are_named(tmp_path: Path, reason: str) -> None:
    source = (
        "import torch, raytrain_hpc as rt\nmodel = torch.nn.Linear(2, 1)\n"
        "run = rt.attach(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        f"for step in run.steps(3):\n    {MISTAKES[reason]}\n"
    )
    with pytest.raises(ModelError, match=reason):
        run_attached(tmp_path, source, 3, "cluster.workers=0", *WORDS)
