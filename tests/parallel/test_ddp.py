"""Gradients summed over replicas: parameters that a rank's loss did not reach, buffers, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
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
from raytrain_hpc.parallel.ddp import DDPSync
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

WIDTH = 4096  # in fp64 every table is a bucket of its own at 1 MiB
WORDS = ["train.dtype=fp64", "train.micro_batch=1", "train.global_batch=6", "parallel.bucket_mib=1", "train.steps=12"]


class Branches(nn.Module):
    """Its first token decides which table a microbatch reaches; nothing ever reaches the last one."""

    def __init__(self, vocabulary: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(vocabulary, WIDTH) for _ in range(3))
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tables[int(tokens[0, 0]) % 3](tokens))


class Counting(nn.Module):
    """Its buffers count what the rank has seen."""

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


def branches(config: Config) -> nn.Module:
    return Branches(int(config.model.vocab_size))


def counting(config: Config) -> nn.Module:
    return Counting(int(config.model.vocab_size))


@pytest.fixture(scope="module")
def alone(pool: WarmPool) -> list[dict[str, float]]:
    return curve(pool)


def curve(pool: WarmPool, *words: str) -> list[dict[str, float]]:
    return get_step_metrics(
        pool.train(make_small_config(None, *WORDS, *words), custom=CustomModel(branches, custom_module.loss))[0]
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_parameters_that_only_some_ranks_reach(pool: WarmPool, alone: list[dict[str, float]], workers: int) -> None:
    for here, there in zip(curve(pool, f"cluster.workers={workers}"), alone, strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-12)
        assert here["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-11)


@pytest.mark.parametrize("zero", [0, 1])
def test_buffers_are_those_of_the_first_rank(pool: WarmPool, tmp_path: Path, zero: int) -> None:
    words = ["cluster.workers=3", f"parallel.zero={zero}", "train.steps=2", "train.micro_batch=1"]
    config = make_small_config(tmp_path, *words)
    pool.train(config, custom=CustomModel(counting, custom_module.loss))
    written = saved(tmp_path, 2, "model.seen_")
    assert len(written) == 8
    first = next(iter(written.values()))
    assert 0 < float(first[0]) < 2 * 12 * 16 * 64
    assert all(torch.equal(one, first) for one in written.values())


def saved(run: Path, step: int, prefix: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    directory = CheckpointStore(run / "checkpoints").get_path(step)
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= {name: tensor for name, tensor in load_file(path).items() if name.startswith(prefix)}
    return found


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_parameter_that_no_rank_reached_has_no_gradient(group: dist.ProcessGroup) -> None:
    module = Branches(8)
    replicated = DDPSync(dict(module.named_parameters()), group, 1)
    for start in (0, 1):  # what an earlier step left in the buckets is gone
        module.zero_grad(set_to_none=True)
        with replicated.backward_context(0, 0, is_last=True):
            module(torch.tensor([[start, 2]])).sum().backward()
        replicated.finish_grad_sync()
        reached = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
        assert reached == {f"tables.{start}.weight", "head.weight", "head.bias"}


def test_frozen_parameters_stay_out_of_it(group: dist.ProcessGroup) -> None:
    module = Branches(8)
    module.head.requires_grad_(False)
    replicated = DDPSync(dict(module.named_parameters()), group, 1)
    with replicated.backward_context(0, 0, is_last=True):
        module(torch.tensor([[0, 2]])).sum().backward()
    replicated.finish_grad_sync()
    assert module.head.weight.grad is None
    assert module.tables[0].weight.grad is not None


def test_two_gradients_in_one_pass_are_refused(group: dist.ProcessGroup) -> None:
    """Reentrant recompute of a shared weight hands in its gradient twice: a bucket would be sent too early."""
    layer = nn.Linear(4, 4)
    replicated = DDPSync(dict(layer.named_parameters()), group, 1)
    x = torch.ones(2, 4, requires_grad=True)
    refused = pytest.raises(ModelError, match=r"(weight|bias) got two gradients.*use_reentrant=False")
    with refused, replicated.backward_context(0, 0, is_last=True):
        once = checkpoint(layer, x, use_reentrant=True)
        checkpoint(layer, once, use_reentrant=True).sum().backward()
