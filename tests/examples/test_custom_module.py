"""Custom module and loss: every layout has the losses of one process, and mistakes are named."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import custom_module
from raytrain_hpc import Config, train
from raytrain_hpc.errors import LayoutError, ModelError, RunFailedError
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.json_lines import read_json_lines
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 20
OVERRIDES = ["model.dropout=0.2", "train.micro_batch_size=1", f"train.steps={STEPS}", "optimizer.lr=0.01"]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "ddp-3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
}


class Bigram(nn.Module):
    """A minimal language model with dropout."""

    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.dropout(torch.tanh(self.table(tokens))))


def build_bigram(config: Config) -> nn.Module:
    return Bigram(int(config.model.vocab_size), config.model.hidden_size)


CUSTOM = {
    "bigram": CustomModel(build_bigram, custom_module.loss),
    "lstm": CustomModel(custom_module.build, custom_module.loss),
}


def run_losses(pool: WarmPool, custom: CustomModel, *overrides: str) -> list[float]:
    return [
        step["train/loss"]
        for step in get_step_metrics(pool.train(make_small_config(None, *OVERRIDES, *overrides), custom=custom)[0])
    ]


@pytest.fixture(scope="module")
def single_process(pool: WarmPool) -> dict[str, list[float]]:
    return {name: run_losses(pool, custom) for name, custom in CUSTOM.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CUSTOM)
def test_layout_has_the_losses_of_one_process(pool: WarmPool, single_process: Any, name: str, layout: str) -> None:
    losses = run_losses(pool, CUSTOM[name], *LAYOUTS[layout])
    assert len(losses) == STEPS
    assert max(abs(a - b) / b for a, b in zip(losses, single_process[name], strict=True)) <= 1e-6


def test_dropout_changes_the_losses(pool: WarmPool, single_process: Any) -> None:
    assert run_losses(pool, CUSTOM["lstm"], "model.dropout=0")[0] != single_process["lstm"][0]
    assert run_losses(pool, CUSTOM["bigram"], "run.seed=7")[0] != single_process["bigram"][0]


def get_model_error(tmp_path: Path, model: Any, loss: Any, *overrides: str) -> str:
    with pytest.raises(ModelError) as caught:
        train(make_small_config(tmp_path / "run", "cluster.workers=0", *overrides), model=model, loss=loss, quiet=True)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loss_that_is_not_a_scalar_tensor_is_rejected(tmp_path: Path) -> None:
    cross_entropy = nn.CrossEntropyLoss(reduction="none")
    message = get_model_error(
        tmp_path, build_bigram, lambda logits, targets: cross_entropy(logits.flatten(0, 1), targets.flatten())
    )
    assert "return a scalar tensor, the sum of the losses" in message
    message = get_model_error(tmp_path, build_bigram, lambda logits, targets: 1.0)
    assert "return a scalar tensor" in message


def test_factory_without_a_trainable_module_is_rejected(tmp_path: Path) -> None:
    assert "the factory returned dict; return a torch.nn.Module" in get_model_error(
        tmp_path, lambda c: {}, custom_module.loss
    )
    assert "no parameters to train" in get_model_error(tmp_path, lambda c: nn.Identity(), custom_module.loss)


def test_module_in_place_of_a_factory_is_rejected(tmp_path: Path) -> None:
    message = get_model_error(tmp_path, Bigram(64, 8), custom_module.loss)
    assert message.startswith("model=Bigram(...): a module") and "model=lambda config: Bigram(...)" in message
    assert "model='bigram': cannot be called" in get_model_error(tmp_path, "bigram", custom_module.loss)
    assert "loss='mean': cannot be called" in get_model_error(tmp_path, build_bigram, "mean")


def cross_entropy(reduction: str, logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def compare_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """A loss in which the samples of a batch compete, as in contrastive learning."""
    rows = logits.mean((1, 2))
    return -(rows - rows.logsumexp(0)).sum()


def half_of_masked_tokens(logits: Tensor, targets: Tensor) -> Tensor:
    mask = targets % 2 == 0
    return (cross_entropy("none", logits, targets) * mask.flatten()).sum() / mask.sum()


@pytest.mark.parametrize(
    ("loss", "is_mean"),
    [
        (partial(cross_entropy, "mean"), True),
        (half_of_masked_tokens, True),
        (partial(cross_entropy, "sum"), False),
        (compare_rows, False),
    ],
)
@pytest.mark.parametrize("rows", [1, 4])
def test_mean_in_place_of_a_sum(pool: WarmPool, loss: Any, is_mean: bool, rows: int) -> None:
    config = make_small_config(None, "train.steps=2", "train.global_batch_size=8", f"train.micro_batch_size={rows}")
    records = pool.train(config, custom=CustomModel(build_bigram, loss))[0]
    warnings = [record["text"] for record in records if record["type"] == "note"]
    assert [text for text in warnings if text.startswith("warning: loss: it returns a mean")] == warnings
    assert len(warnings) == is_mean


@pytest.mark.parametrize("setting", ["parallel.tp=2", "parallel.pp=2", "lora.rank=4"])
def test_features_of_the_built_in_decoder_are_rejected(tmp_path: Path, setting: str) -> None:
    config = make_small_config(tmp_path / "run", "cluster.workers=2", setting)
    with pytest.raises(LayoutError, match=f"^{setting} .*set it to"):
        train(config, model=build_bigram, loss=custom_module.loss, quiet=True)


def test_model_and_loss_are_required_together(tmp_path: Path) -> None:
    assert "pass both, or neither" in get_model_error(tmp_path, build_bigram, None)
    assert "pass both, or neither" in get_model_error(tmp_path, None, custom_module.loss)


def test_wrong_loss_raises_the_same_error_on_a_cluster(ray_cluster: None, tmp_path: Path) -> None:
    config = make_small_config(tmp_path / "run", "cluster.workers=2")
    with pytest.raises(ModelError, match="return a scalar tensor"):
        train(config, model=build_bigram, loss=lambda logits, targets: logits, quiet=True)


class WrongWidth(Bigram):
    """A model whose layers do not fit together."""

    def __init__(self) -> None:
        super().__init__(64, 8)
        self.head = nn.Linear(7, 64)


def test_mistake_in_a_model_is_not_retried(ray_cluster: None, tmp_path: Path, capsys: Any) -> None:
    config = make_small_config(tmp_path / "run", "cluster.workers=2")
    with pytest.raises(RunFailedError, match=r"on all ranks before the first step.*in forward\)$") as caught:
        train(config, model=lambda config: WrongWidth(), loss=custom_module.loss)
    assert "mat1 and mat2 shapes cannot be multiplied" in str(caught.value)
    assert len(read_json_lines(tmp_path / "run" / "incidents.jsonl")) == 1
    output = capsys.readouterr().out
    assert output.count("Traceback (most recent call last)") == 1
    assert output.count("  File ") == 1 and "self.head(self.dropout" in output
