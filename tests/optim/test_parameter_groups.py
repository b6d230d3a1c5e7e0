"""Parameter groups by pattern: learning rates, weight decay and frozen parameters, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples import custom_module
from raytrain_hpc import train
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.optim.dense_training import (
    BASE,
    LAYOUTS,
    Parameters,
    Update,
    measure_difference,
    select_weights,
    train_dense,
    train_layout,
)
from tests.optim.test_muon import PlainMuon
from tests.parallel.layout_run import GPT2, LLAMA, ODD
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

# The first layer and the embeddings do not train, so that a first pipeline stage has nothing to train.
GROUPS = (
    "optimizer.groups=[{pattern: layers.0.*, frozen: true}, {pattern: 'embedding.*', frozen: true}, "
    "{pattern: 'positions.*', frozen: true}, {pattern: '*norm*', lr_factor: 0.5, weight_decay: 0.3}, "
    "{pattern: '*.qkv.weight', lr_factor: 2}, {pattern: '*.out.*', weight_decay: 0}, {pattern: '*qkv*', frozen: true}]"
)
MODEL = [*GPT2, *ODD, "model.tie_embeddings=false"]
UNTIED = [*LLAMA, *ODD, "model.num_kv_heads=2", "model.tie_embeddings=false"]


def get_settings(name: str, ndim: int) -> tuple[float, float] | None:
    """Return the factor of the learning rate and the weight decay of a parameter, None if it is frozen."""
    default = 0.1 if ndim >= 2 else 0.0
    if name.startswith(("layers.0.", "embedding.", "positions.")):
        return None
    if "norm" in name:
        return 0.5, 0.3
    if name.endswith("qkv.weight"):
        return 2.0, default
    if ".out." in name:
        return 1.0, 0.0
    return None if "qkv" in name else (1.0, default)


def make_adamw(parameters: Parameters) -> Update:
    groups = []
    for name, parameter in parameters.items():
        if settings := get_settings(name, parameter.ndim):
            groups.append({"params": [parameter], "lr": 3e-3 * settings[0], "weight_decay": settings[1]})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    return _freeze_and_step(parameters, optimizer)


def make_sgd(parameters: Parameters) -> Update:
    groups = []
    for name, parameter in parameters.items():
        if settings := get_settings(name, parameter.ndim):
            groups.append({"params": [parameter], "lr": 3e-3 * settings[0], "weight_decay": settings[1]})
    return _freeze_and_step(parameters, torch.optim.SGD(groups))


def _freeze_and_step(parameters: Parameters, optimizer: torch.optim.Optimizer) -> Update:
    for name, parameter in parameters.items():
        parameter.requires_grad_(get_settings(name, parameter.ndim) is not None)

    def update(parameters: Parameters) -> None:
        optimizer.step()

    return update


ADAMW_BY_PATH = ["optimizer.name=torch.optim.AdamW", "optimizer.args={betas: [0.9, 0.95], weight_decay: 0.1}"]
OPTIMIZERS = {"adamw": ([], make_adamw), "sgd": (["optimizer.name=sgd"], make_sgd), "path": (ADAMW_BY_PATH, make_adamw)}
CASES = [
    *(("adamw", layout) for layout in LAYOUTS if "ep" not in layout),
    *((name, layout) for name in ("sgd", "path") for layout in ("ddp-2", "tp-2 zero3-2", "pp-2 zero2-2")),
]


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, torch.Tensor]]:
    config = make_small_config(None, *BASE, *MODEL)
    return {name: train_dense(config, make_update) for name, (_, make_update) in OPTIMIZERS.items()}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_agrees_with_groups_of_torch(
    pool: WarmPool, references: Any, tmp_path: Path, name: str, layout: str
) -> None:
    state = train_layout(pool, tmp_path, GROUPS, *OPTIMIZERS[name][0], *MODEL, *LAYOUTS[layout])
    weights = select_weights(state)
    assert measure_difference(weights, references[name]) < 1e-11
    trained = {n for n, weight in weights.items() if get_settings(n, weight.ndim)}
    moments = {key.removeprefix("optimizer.exp_avg.") for key in state if key.startswith("optimizer.exp_avg.")}
    assert moments == (set() if name == "sgd" else trained)


@pytest.mark.parametrize("layout", ["ddp-2", "zero3-3", "tp-2 zero3-2", "pp-2"])
def test_groups_apply_to_matrices_of_muon(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    """A group with half the learning rate of all parameters, and one that freezes the rest."""
    groups = "optimizer.groups=[{pattern: 'embedding.*', frozen: true}, {pattern: '*', lr_factor: 0.5}]"
    words = ["optimizer.name=muon", *UNTIED, *LAYOUTS[layout]]
    state = train_layout(pool, tmp_path, *words, groups, "optimizer.lr=6e-3")

    def make_update(parameters: Parameters) -> Update:
        parameters["embedding.weight"].requires_grad_(False)
        update = PlainMuon(parameters)
        return lambda trained: update({name: p for name, p in trained.items() if p.requires_grad})

    expected = train_dense(make_small_config(None, *BASE, *UNTIED), make_update)
    assert measure_difference(select_weights(state), expected) < 1e-11


def test_frozen_parameters_have_no_gradients(pool: WarmPool) -> None:
    sizes = []
    for words in ([], ["optimizer.groups=[{pattern: layers.0.*, frozen: true}, {pattern: layers.1.*, frozen: true}]"]):
        records = pool.train(make_small_config(None, *MODEL, *words, "train.steps=2"))[0]
        metrics = get_step_metrics(records)[0]
        sizes.append((metrics["memory/gradients_gib"], metrics["memory/moments_gib"]))
    (all_gradients, all_moments), (gradients, moments) = sizes
    num_elements = 2 * 65 * 32 + 15 * 32 + 2 * 32  # embedding, head, positions and the last norm
    assert gradients * 2**30 == 4 * num_elements < all_gradients * 2**30
    assert moments * 2**30 == 8 * num_elements < all_moments * 2**30


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{pattern: layer.0.*}]", r"optimizer.groups.pattern='layer.0.\*' .*matches no parameter; .*embedding.weight"),
        ("[{pattern: '*', frozen: true}]", r"optimizer.groups=\['\*'\] .*freezes every parameter"),
        ("[{lr_factor: 2}]", "every group needs a pattern"),
        ("[{pattern: '*', lr_factor: -1}]", r"optimizer.groups\[0\].lr_factor=-1.0 .*needs at least 0"),
        ("[{pattern: '*', lr: 2}]", "needs a list like"),
    ],
)
def test_a_group_that_cannot_be_applied_is_refused_before_anything_starts(
    tmp_path: Path, groups: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        train(make_small_config(tmp_path / "run", f"optimizer.groups={groups}", "cluster.workers=0"), quiet=True)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


class TwoTables(nn.Module):
    """A bigram model of two factors."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.first = nn.Embedding(vocab_size, 8)
        self.second = nn.Linear(8, vocab_size)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(tokens))


def build_two_tables(config: Config) -> nn.Module:
    return TwoTables(int(config.model.vocab_size))


@pytest.mark.parametrize("zero", [0, 3])
def test_parameters_of_a_custom_model_are_frozen_by_their_names(pool: WarmPool, tmp_path: Path, zero: int) -> None:
    custom, words = CustomModel(build_two_tables, custom_module.loss), ["cluster.workers=2", f"parallel.zero={zero}"]
    with pytest.raises(RankFailedError, match=r"third.\*' .*matches no parameter; their names are like first.weight"):
        pool.train(make_small_config(None, *words, "optimizer.groups=[{pattern: third.*}]"), custom=custom)
    records = pool.train(
        make_small_config(tmp_path, *words, "optimizer.groups=[{pattern: first.*, frozen: true}]"), custom=custom
    )
    assert get_step_metrics(records[0])[0]["memory/moments_gib"] * 2**30 <= 8 * (8 * 64 + 64)
