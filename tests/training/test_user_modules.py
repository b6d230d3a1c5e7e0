"""Modules of users that do unusual things, under ZeRO and in steps that are not applied, compared with plain runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raytrain_hpc as rt
from examples import custom_module
from raytrain_hpc.errors import DataError
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.trainer import Trainer
from tests.training.normalized_bigram import NormalizedBigram
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, make_worker_spec

EXACT = ["train.dtype=fp64", "optimizer.lr=1e-2"]


class Branch(nn.Module):
    """Two layers of the same shape of which a microbatch uses one, and one that is never used."""

    def __init__(self, width: int):
        super().__init__()
        self.even, self.odd, self.unused = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: Tensor, is_odd: bool) -> Tensor:
        return x + torch.tanh((self.odd if is_odd else self.even)(x))


class Branches(nn.Module):
    """A model whose microbatches use different parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList([Branch(8), Branch(8)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, bool(tokens[0, 0] % 2))
        return self.head(x)


def build_branches(config: rt.Config) -> nn.Module:
    return Branches()


class SumUnused(rt.Callback):
    """The sum of the parameters that no microbatch uses, as a metric: weight decay would change it."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        parts = [p.to_local() if hasattr(p, "to_local") else p for p in self._list_unused()]
        metrics["unused"] = float(sum(part.detach().abs().sum() for part in parts))

    def _list_unused(self) -> list[Any]:
        return [parameter for name, parameter in self.context.parameters.items() if "unused" in name]


@pytest.mark.parametrize(
    "words",
    [["parallel.zero=1"], ["parallel.zero=2"], ["parallel.zero=3", "train.deterministic=elastic"]],
    ids=" ".join,
)
def test_microbatches_may_use_different_parameters(pool: WarmPool, words: list[str]) -> None:
    custom, base = CustomModel(build_branches, custom_module.loss), [*EXACT, "train.micro_batch_size=6"]
    runs = [
        get_step_metrics(pool.train(make_small_config(None, *base, *more), custom=custom, callbacks=[SumUnused()])[0])
        for more in (["cluster.workers=1"], ["cluster.workers=2", *words])
    ]
    single, sharded = runs
    assert [step["train/loss"] for step in sharded] == pytest.approx([s["train/loss"] for s in single], rel=1e-12)
    assert len({step["unused"] for step in sharded}) == len({step["unused"] for step in single}) == 1


class ShrinkAfterEvaluation(rt.Callback):
    """A change of the weights in a hook between an evaluation and the next step."""

    def post_eval(self, metrics: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter in self.context.parameters.values():
                parameter.mul_(0.9)


def test_weights_that_change_after_an_evaluation_are_gathered_again(pool: WarmPool) -> None:
    """ZeRO-1 and 2 keep gathered weights from a forward pass to the next backward pass."""
    words = [*EXACT, "eval.interval=1", "cluster.workers=2", "fault.replica_check_interval=0"]
    losses = []
    for zero in (0, 2):
        config = make_small_config(None, *words, f"parallel.zero={zero}")
        records = pool.train(config, callbacks=[ShrinkAfterEvaluation()])[0]
        losses.append([step["train/loss"] for step in get_step_metrics(records)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


class FailingBigram(NormalizedBigram):
    """A bigram model whose n-th pass over the sample with these tokens is not finite, or every one."""

    bad_tokens: Tensor | None = None
    bad_pass, num_passes = 0, 0

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training and self.bad_tokens is not None and torch.equal(tokens, self.bad_tokens):
            self.num_passes += 1
            if self.bad_pass in (0, self.num_passes):
                return (
                    super().forward(tokens) * float("inf") + self.norm(self.table(tokens).transpose(1, 2) * 1e30).sum()
                )
        return super().forward(tokens)


def build_failing_trainer(tmp_path: Path, *words: str) -> tuple[Trainer, FailingBigram]:
    config = make_small_config(tmp_path, "fault.on_nan=skip", "train.micro_batch_size=12", *words)
    custom = CustomModel(lambda config: FailingBigram(64, 8), custom_module.loss)
    trainer = build_trainer(
        make_worker_spec(config, 1, steps_to=3, custom=custom), 0, torch.device("cpu"), None, ControlChannel()
    )
    module: Any = trainer.model_step.model.modules[0]  # type: ignore[attr-defined]
    return trainer, module


def test_a_step_that_is_repeated_changes_running_statistics_once(tmp_path: Path) -> None:
    expected, clean = build_failing_trainer(tmp_path / "clean")
    trainer, module = build_failing_trainer(tmp_path / "fault")
    module.bad_tokens, module.bad_pass = trainer.loader.read_microbatch(1, 0).inputs, 1
    for step in range(3):
        assert trainer.train_step(step).loss == expected.train_step(step).loss
    assert module.num_passes == 2
    assert torch.equal(module.norm.running_var, clean.norm.running_var)
    assert module.norm.num_batches_tracked == clean.norm.num_batches_tracked == 3


@pytest.mark.parametrize("deterministic", ["false", "elastic"])
def test_a_step_that_is_skipped_leaves_running_statistics(tmp_path: Path, deterministic: str) -> None:
    trainer, module = build_failing_trainer(tmp_path, f"train.deterministic={deterministic}")
    module.bad_tokens = trainer.loader.read_microbatch(1, 0).inputs
    trainer.train_step(0)
    before = module.norm.running_var.clone()
    trainer.train_step(1)
    assert torch.equal(module.norm.running_var, before) and module.norm.num_batches_tracked == 1


def without_targets(read: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as `read` whose batches have no target, as if prompts filled all rows."""

    def read_without_targets(*arguments: Any, **keywords: Any) -> Any:
        return replace(read(*arguments, **keywords), num_tokens=0)

    return read_without_targets


def test_a_batch_without_targets_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = build_failing_trainer(tmp_path, "fault.on_nan=stop")
    monkeypatch.setattr(trainer.loader, "read", without_targets(trainer.loader.read))
    with pytest.raises(DataError, match=r"no token of a global batch counts.*fault.on_nan=skip.*train.seq_len"):
        trainer.train_step(0)
    evaluator = trainer.completion.evaluator
    assert evaluator is not None
    monkeypatch.setattr(evaluator.eval_sets[""], "get_batch", without_targets(evaluator.eval_sets[""].get_batch))
    with pytest.raises(DataError, match=r"no token of the validation set counts.*train.seq_len"):
        evaluator.evaluate()


class ViewedBigram(nn.Module):
    """A bigram model with weights that are views, and a scale with or without dimensions."""

    def __init__(self, scale: tuple[int, ...], *, is_tied: bool = False):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64, bias=False)
        self.head.weight = nn.Parameter(torch.randn(8, 64).T)
        if is_tied:
            self.table.weight = nn.Parameter(self.head.weight.detach())
        self.scale = nn.Parameter(torch.full(scale, 0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(tokens)) * self.scale)


def train_viewed(pool: WarmPool, module: Any, *words: str) -> list[tuple[float, float]]:
    custom = CustomModel(module, custom_module.loss)
    records = pool.train(make_small_config(None, "train.micro_batch_size=2", "train.steps=3", *words), custom=custom)
    return [(step["train/loss"], step["train/grad_norm"]) for step in get_step_metrics(records[0])]


def build_viewed(config: rt.Config) -> nn.Module:
    return ViewedBigram((1,))


def build_with_scalar(config: rt.Config) -> nn.Module:
    return ViewedBigram(())


def build_tied_by_a_view(config: rt.Config) -> nn.Module:
    return ViewedBigram((1,), is_tied=True)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_that_are_not_contiguous_are_sharded(pool: WarmPool, zero: int) -> None:
    expected = train_viewed(pool, build_viewed, "train.dtype=fp64")
    steps = train_viewed(pool, build_viewed, "train.dtype=fp64", "cluster.workers=2", f"parallel.zero={zero}")
    assert steps == [pytest.approx(step, rel=1e-11) for step in expected]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (build_with_scalar, r"parallel.zero=3: parameter 'scale' of the model has no dimensions.*set parallel.zero=0"),
        (build_tied_by_a_view, r"parallel.zero=3: parameter 'table.weight' of the model is a view of memory"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_parameters_that_cannot_be_sharded_are_named(pool: WarmPool, module: Any, message: str, workers: int) -> None:
    with pytest.raises(RankFailedError, match=message):
        train_viewed(pool, module, f"cluster.workers={workers}", "parallel.zero=3")


class NormalizedBlock(nn.Module):
    """A block with running statistics."""

    def __init__(self, width: int):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(torch.tanh(self.linear(x)).transpose(1, 2)).transpose(1, 2)


class Stack(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def build_normalized(config: rt.Config) -> nn.Module:
    return Stack([NormalizedBlock(8), NormalizedBlock(8)])


def build_repeated(config: rt.Config) -> nn.Module:
    return Stack([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh())] * 3)


def build_tied(config: rt.Config) -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    blocks[2][1].weight = blocks[0][1].weight
    return Stack([*blocks])


@pytest.mark.parametrize("deterministic", ["false", "elastic"])
def test_recomputation_leaves_running_statistics(tmp_path: Path, deterministic: str) -> None:
    """Also if it ends early, when the last activation that is needed is there."""
    values = []
    for policy in ("none", "full", "selective"):
        words = [f"parallel.activation_checkpointing={policy}", f"train.deterministic={deterministic}"]
        config = make_small_config(tmp_path / policy, "train.micro_batch_size=4", *words)
        spec = make_worker_spec(config, 1, steps_to=2, custom=CustomModel(build_normalized, custom_module.loss))
        trainer = build_trainer(spec, 0, torch.device("cpu"), None, ControlChannel())
        losses = [trainer.train_step(step).loss for step in range(2)]
        norm: Any = trainer.model_step.model.modules[0].blocks[1].norm  # type: ignore[attr-defined]
        values.append((losses, int(norm.num_batches_tracked), norm.running_mean.tolist(), norm.running_var.tolist()))
    assert values[0] == values[1] == values[2]


@pytest.mark.parametrize("words", [["parallel.zero=3"], ["parallel.zero=1", "train.deterministic=elastic"]])
@pytest.mark.parametrize("build", [build_repeated, build_tied])
def test_blocks_may_be_repeated_and_share_parameters(pool: WarmPool, build: Any, words: list[str]) -> None:
    base = [*EXACT, "train.micro_batch_size=3", "parallel.activation_checkpointing=full"]
    losses = []
    for more in (["cluster.workers=1"], ["cluster.workers=2", *words]):
        records = pool.train(make_small_config(None, *base, *more), custom=CustomModel(build, custom_module.loss))[0]
        losses.append([step["train/loss"] for step in get_step_metrics(records)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def build_by_settings(config: rt.Config) -> nn.Module:
    """Build a bigram model of the size that the settings and the dataset say."""
    model = config.model
    assert (model.ffn_size, model.num_kv_heads) == (4 * model.hidden_size, model.num_heads)
    return nn.Sequential(nn.Embedding(model.vocab_size, model.ffn_size), nn.Linear(model.ffn_size, model.vocab_size))


def test_a_factory_gets_settings_in_numbers(tmp_path: Path) -> None:
    """Also those that are `auto` and depend on the dataset."""
    words = ["model.vocab_size=auto", "model.ffn_size=auto", "model.activation=gelu", "train.steps=3"]
    config = make_small_config(tmp_path, *words, "cluster.workers=0")
    assert rt.train(config, model=build_by_settings, loss=custom_module.loss, quiet=True).steps == 3
