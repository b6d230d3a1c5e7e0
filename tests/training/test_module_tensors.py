"""Tensors of a user's module: casts keep complex numbers, buffers of any dtype are broadcast, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import custom_module
from raytrain_hpc import Config
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.errors import ModelError
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.training.module_tensors import cast_floating_point, check_dtypes
from tests.training.normalized_bigram import NormalizedBigram
from tests.warm_pool import WarmPool, make_small_config

ROTATIONS = torch.polar(torch.ones(4), torch.arange(4.0))


class RotatedBigram(NormalizedBigram):
    """A bigram model with a complex table, and a counter of dtype int16 in its state."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__(vocab_size, width)
        self.register_buffer("rotations", ROTATIONS.clone(), persistent=False)
        self.register_buffer("num_passes", torch.zeros((), dtype=torch.int16))

    def forward(self, tokens: Tensor) -> Tensor:
        if not torch.equal(self.rotations, ROTATIONS):
            raise ValueError("the table has changed")
        self.num_passes += self.training
        return super().forward(tokens)


def build_rotated_bigram(config: Config) -> RotatedBigram:
    return RotatedBigram(int(config.model.vocab_size), config.model.hidden_size)


def test_ranks_train_with_complex_and_int16_buffers(pool: WarmPool, tmp_path: Path) -> None:
    words = ["cluster.workers=2", "train.steps=2", "train.micro_batch_size=6", "train.dtype=bf16", "eval.interval=0"]
    pool.train(make_small_config(tmp_path, *words), custom=CustomModel(build_rotated_bigram, custom_module.loss))
    checkpoint = CheckpointStore(tmp_path / "checkpoints").find(2)
    assert checkpoint is not None
    num_passes = torch.zeros((), dtype=torch.int16)
    read_state(checkpoint, ShardedState([StateShard.from_tensor("model.num_passes", num_passes)]))
    assert num_passes == 2  # one microbatch per rank and step


def test_a_cast_changes_floating_point_tensors_alone() -> None:
    module = cast_floating_point(RotatedBigram(4, 8), torch.bfloat16)
    assert module.head.weight.dtype == module.norm.running_mean.dtype == torch.bfloat16
    assert module.num_passes.dtype == torch.int16 and torch.equal(module.rotations, ROTATIONS)
    assert "rotations" in dict(module.named_buffers()) and "rotations" not in module.state_dict()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_dtypes_that_the_state_cannot_hold_are_refused(dtype: torch.dtype) -> None:
    module = nn.Linear(1, 1)
    module.register_buffer("table", torch.zeros(2, dtype=dtype), persistent=False)
    check_dtypes(module)
    module.register_buffer("counts", torch.zeros(2, dtype=dtype))
    with pytest.raises(ModelError, match="model: persistent buffer counts has dtype .*persistent=False"):
        check_dtypes(module)
    with pytest.raises(ModelError, match="parameter 0 has dtype complex64; .*view_as_real"):
        check_dtypes(nn.ParameterList([torch.zeros(2, dtype=torch.complex64)]))
