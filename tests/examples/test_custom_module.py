"""A user's own module and loss: any layout gives the losses of one process, and a wrong one says what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import custom_module
from raytrain_hpc import Config, train
from raytrain_hpc.errors import ModelError
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 20
WORDS = ["model.dropout=0.2", "train.micro_batch=1", f"train.steps={STEPS}", "train.lr=0.01"]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "ddp-3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
}


class Bigram(nn.Module):
    """The smallest language model that drops out."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.table(tokens))))


def bigram(config: Config) -> nn.Module:
    return Bigram(int(config.model.vocab_size), config.model.hidden_size)


CUSTOM = {
    "bigram": CustomModel(bigram, custom_module.loss),
    "lstm": CustomModel(custom_module.build, custom_module.loss),
}


def losses(pool: WarmPool, custom: CustomModel, *words: str) -> list[float]:
    return [
        step["train/loss"]
        for step in get_step_metrics(pool.train(make_small_config(None, *WORDS, *words), custom=custom)[0])
    ]


@pytest.fixture(scope="module")
def alone(pool: WarmPool) -> dict[str, list[float]]:
    return {name: losses(pool, custom) for name, custom in CUSTOM.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CUSTOM)
def test_layout_gives_the_losses_of_one_process(pool: WarmPool, alone: Any, name: str, layout: str) -> None:
    here = losses(pool, CUSTOM[name], *LAYOUTS[layout])
    assert len(here) == STEPS
    assert max(abs(a - b) / b for a, b in zip(here, alone[name], strict=True)) <= 1e-6


def test_dropout_is_drawn(pool: WarmPool, alone: Any) -> None:
    assert losses(pool, CUSTOM["lstm"], "model.dropout=0")[0] != alone["lstm"][0]
    assert losses(pool, CUSTOM["bigram"], "run.seed=7")[0] != alone["bigram"][0]


def attempt(tmp_path: Path, model: Any, loss: Any, *words: str) -> str:
    with pytest.raises(ModelError) as caught:
        train(make_small_config(tmp_path / "run", "cluster.workers=0", *words), model=model, loss=loss, quiet=True)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loss_that_is_no_scalar_is_refused(tmp_path: Path) -> None:
    kept = nn.CrossEntropyLoss(reduction="none")
    said = attempt(tmp_path, bigram, lambda logits, targets: kept(logits.flatten(0, 1), targets.flatten()))
    assert "return a scalar tensor, the sum of the losses" in said
    said = attempt(tmp_path, bigram, lambda logits, targets: 1.0)
    assert "return a scalar tensor" in said


def test_factory_that_gives_no_module_is_refused(tmp_path: Path) -> None:
    assert "the factory returned dict; return a torch.nn.Module" in attempt(tmp_path, lambda c: {}, custom_module.loss)
    assert "no parameters to train" in attempt(tmp_path, lambda c: nn.Identity(), custom_module.loss)


def test_model_and_loss_go_together(tmp_path: Path) -> None:
    assert "give both, or neither" in attempt(tmp_path, bigram, None)
    assert "give both, or neither" in attempt(tmp_path, None, custom_module.loss)


def test_wrong_loss_on_a_cluster_is_the_same_error(ray_cluster: None, tmp_path: Path) -> None:
    config = make_small_config(tmp_path / "run", "cluster.workers=2")
    with pytest.raises(ModelError, match="return a scalar tensor"):
        train(config, model=bigram, loss=lambda logits, targets: logits, quiet=True)
