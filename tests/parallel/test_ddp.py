"""DDP: parameters without gradient on some ranks, buffers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from examples import custom_module
from raytrain_hpc import Config
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.errors import ModelError
from raytrain_hpc.parallel.ddp import AllReduceBucket, DDPSync
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

WIDTH = 4096  # in fp64, each table fills a bucket of 1 MiB
WORDS = [
    "train.dtype=fp64",
    "train.micro_batch_size=1",
    "train.global_batch_size=6",
    "parallel.bucket_mib=1",
    "train.steps=12",
]


class Branches(nn.Module):
    """A module whose first token selects the table that a microbatch uses; `never` is never used."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocabulary, WIDTH) for _ in range(3))
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tables[int(tokens[0, 0]) % 3](tokens))


class Counting(nn.Module):
    """A module whose buffers sum the tokens that the rank has seen."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)
        for number in range(8):
            self.register_buffer(f"seen_{number}", torch.zeros(1000))

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            for buffer in self.buffers():
                buffer += tokens.sum()
        return self.table(tokens)


def make_branches(config: Config) -> nn.Module:
    return Branches(int(config.model.vocab_size))


def make_counting(config: Config) -> nn.Module:
    return Counting(int(config.model.vocab_size))


@pytest.fixture(scope="module")
def single_rank_metrics(pool: WarmPool) -> list[dict[str, float]]:
    return train_metrics(pool)


def train_metrics(pool: WarmPool, *words: str) -> list[dict[str, float]]:
    return get_step_metrics(
        pool.train(make_small_config(None, *WORDS, *words), custom=CustomModel(make_branches, custom_module.loss))[0]
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_with_gradients_on_some_ranks_only(
    pool: WarmPool, single_rank_metrics: list[dict[str, float]], workers: int
) -> None:
    for metrics, expected in zip(train_metrics(pool, f"cluster.workers={workers}"), single_rank_metrics, strict=True):
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-12)
        assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-11)


@pytest.mark.parametrize("zero", [0, 1])
def test_buffers_of_the_first_rank_are_saved(pool: WarmPool, tmp_path: Path, zero: int) -> None:
    words = ["cluster.workers=3", f"parallel.zero={zero}", "train.steps=2", "train.micro_batch_size=1"]
    config = make_small_config(tmp_path, *words)
    pool.train(config, custom=CustomModel(make_counting, custom_module.loss))
    buffers = load_checkpoint_tensors(tmp_path, 2, "model.seen_")
    assert len(buffers) == 8
    first = next(iter(buffers.values()))
    assert 0 < float(first[0]) < 2 * 12 * 16 * 64
    assert all(torch.equal(buffer, first) for buffer in buffers.values())


def load_checkpoint_tensors(run: Path, step: int, prefix: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    directory = CheckpointStore(run / "checkpoints").get_path(step)
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= {name: tensor for name, tensor in load_file(path).items() if name.startswith(prefix)}
    return tensors


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_parameter_without_gradient_on_all_ranks_keeps_none(group: dist.ProcessGroup) -> None:
    module = Branches(8)
    sync = DDPSync({0: dict(module.named_parameters())}, partial(AllReduceBucket, group=group), 1)
    for start in (0, 1):  # the buckets keep nothing of an earlier step
        module.zero_grad(set_to_none=True)
        with sync.backward_context(0, 0, is_last=True):
            module(torch.tensor([[start, 2]])).sum().backward()
        sync.finish_grad_sync()
        with_grad = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
        assert with_grad == {f"tables.{start}.weight", "head.weight", "head.bias"}


def test_frozen_parameters_get_no_gradient(group: dist.ProcessGroup) -> None:
    module = Branches(8)
    module.head.requires_grad_(False)
    sync = DDPSync({0: dict(module.named_parameters())}, partial(AllReduceBucket, group=group), 1)
    with sync.backward_context(0, 0, is_last=True):
        module(torch.tensor([[0, 2]])).sum().backward()
    sync.finish_grad_sync()
    assert module.head.weight.grad is None
    assert module.tables[0].weight.grad is not None


def test_two_gradients_in_one_pass_are_refused(group: dist.ProcessGroup) -> None:
    """Reentrant checkpointing of a shared weight gives its gradient twice: a bucket would be reduced too early."""
    layer = nn.Linear(4, 4)
    sync = DDPSync({0: dict(layer.named_parameters())}, partial(AllReduceBucket, group=group), 1)
    x = torch.ones(2, 4, requires_grad=True)
    refused = pytest.raises(ModelError, match=r"(weight|bias) got two gradients.*use_reentrant=False")
    with refused, sync.backward_context(0, 0, is_last=True):
        output = checkpoint(layer, x, use_reentrant=True)
        checkpoint(layer, output, use_reentrant=True).sum().backward()
