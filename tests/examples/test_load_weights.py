"""Weights of a run with a user's module, loaded into another instance of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import raytrain_hpc as rt
from examples import custom_module
from raytrain_hpc.errors import CheckpointError, ModelError
from tests.training.normalized_bigram import NormalizedBigram
from tests.warm_pool import make_small_config


class TiedBigram(NormalizedBigram):
    """A bigram model with one weight for table and head, and a buffer that is not part of its state."""

    def __init__(self) -> None:
        super().__init__(64, 8)
        self.head.weight = self.table.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def train(run_dir: Path) -> nn.Module:
    """Train in this process, and return the module that was trained."""
    built: list[nn.Module] = []

    def build(config: rt.Config) -> nn.Module:
        built.append(TiedBigram())
        return built[-1]

    words = ["cluster.workers=0", "cluster.device=cpu", "train.steps=3", "checkpoint.interval=2"]
    ema = rt.EMA(0.5)
    config = make_small_config(run_dir, *words)
    rt.train(config, model=build, loss=custom_module.loss, callbacks=[ema], quiet=True)
    return built[-1]


def test_loaded_weights_are_those_of_the_trained_module(tmp_path: Path) -> None:
    trained, loaded = train(tmp_path), TiedBigram().to(torch.bfloat16)
    assert rt.load_weights(tmp_path, loaded, weights="trained") == 3
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(loaded.state_dict()[name].dtype)), name
    assert loaded.head.weight is loaded.table.weight and loaded.norm.num_batches_tracked == 3
    averaged = TiedBigram()
    assert rt.load_weights(tmp_path, averaged, step=2) == 2
    assert not torch.equal(averaged.table.weight, trained.table.weight)


def test_a_module_of_other_names_or_shapes_is_left_as_it_is(tmp_path: Path) -> None:
    train(tmp_path)
    for module, message in (
        (NormalizedBigram(64, 8), "head.weight is in the module, not in the checkpoint"),
        (nn.Sequential(TiedBigram()), "0.head.bias is in the module, not in the checkpoint; build the module as"),
        (nn.Module(), "head.bias is in the checkpoint, not in the module"),
    ):
        before = [tensor.clone() for tensor in module.state_dict().values()]
        with pytest.raises(ModelError, match=message):
            rt.load_weights(tmp_path, module)
        assert all(map(torch.equal, module.state_dict().values(), before))
    wider = TiedBigram()
    wider.norm = nn.BatchNorm1d(9)
    with pytest.raises(ModelError, match=r"norm.weight is \[8\], \[9\] in the module"):
        rt.load_weights(tmp_path, wider)
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        rt.load_weights(tmp_path / "checkpoints", wider)
