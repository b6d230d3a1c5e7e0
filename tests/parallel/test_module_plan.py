"""Any module under tensor parallelism by a plan: the losses of one process, for every style, and mistakes are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import custom_module
from raytrain_hpc import Config, LayoutError, ModelError, train
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

BASE = ["train.steps=4", "train.micro_batch_size=2", "train.dtype=fp64", "train.global_batch_size=12"]
LAYOUTS = {
    "tp2": ["cluster.workers=2", "parallel.tp=2"],
    "tp3": ["cluster.workers=3", "parallel.tp=3"],
    "tp2 x ddp2": ["cluster.workers=4", "parallel.tp=2"],
    "tp2 x zero1-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=1"],
    "tp2 x zero3-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "tp2 x zero3-2, recompute": [
        "cluster.workers=4",
        "parallel.tp=2",
        "parallel.zero=3",
        "parallel.activation_checkpointing=full",
    ],
}
WIDTH, HEADS, VOCABULARY = 24, 6, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head_norm = nn.LayerNorm(WIDTH // HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(self.head_norm(q), k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 36), nn.Linear(36, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.middle(x))


def build(config: Config) -> nn.Module:
    return Model()


def build_tied(config: Config) -> nn.Module:
    model = Model()
    model.head.weight = model.table.weight
    return model


PLAN = {
    "blocks.*": "block",
    "table": "embedding_rowwise",
    "positions": "embedding_colwise",
    "blocks.*.norm": "sequence",
    "blocks.*.attention.[qkv]": "colwise",
    "blocks.*.attention.head_norm": "replicated_with_grad_allreduce",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.gate_up": "packed_colwise",
    "blocks.*.down": "rowwise",
    "middle": "rowwise_split_input",
    "head": "colwise_gather_output",
}


def run_steps(pool: WarmPool, words: list[str], factory: Any = build, plan: Any = PLAN) -> list[tuple[float, float]]:
    custom = CustomModel(factory, custom_module.loss, plan)
    records = pool.train(make_small_config(None, *BASE, *words), custom=custom)
    return [(step["train/loss"], step["train/grad_norm"]) for step in get_step_metrics(records[0])]


@pytest.fixture(scope="module")
def single_process(pool: WarmPool) -> dict[Any, list[tuple[float, float]]]:
    return {factory: run_steps(pool, [], factory) for factory in (build, build_tied)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_losses_and_norms_of_one_process(pool: WarmPool, single_process: Any, layout: str) -> None:
    """In fp64, over 4 steps: a gradient that one style gets wrong would change the next loss."""
    steps = run_steps(pool, LAYOUTS[layout])
    assert steps == [pytest.approx(expected, rel=1e-11) for expected in single_process[build]]


def test_a_weight_that_two_layers_share_stays_replicated(pool: WarmPool, single_process: Any) -> None:
    steps = run_steps(pool, LAYOUTS["tp2 x zero3-2"], build_tied)
    assert steps == [pytest.approx(expected, rel=1e-11) for expected in single_process[build_tied]]


def test_checkpoints_move_between_layouts_with_and_without_a_plan(pool: WarmPool, tmp_path: Path) -> None:
    custom = CustomModel(build, custom_module.loss, PLAN)

    def run(words: list[str], **options: Any) -> list[float]:
        records = pool.train(make_small_config(tmp_path, *BASE, *words), custom=custom, **options)
        return [step["train/loss"] for step in get_step_metrics(records[0])]

    whole = run(LAYOUTS["tp2 x zero3-2"], steps_to=2)
    for words in (["cluster.workers=1"], LAYOUTS["tp3"], ["cluster.workers=2", "parallel.zero=1"]):
        losses = whole + run(words, resume_step=2)
        assert losses == pytest.approx(run_without_fault(pool), rel=1e-11)


def run_without_fault(pool: WarmPool) -> list[float]:
    return [loss for loss, _ in run_steps(pool, [])]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"blocks.*.attention.w": "colwise"},
            r"plan\['blocks.\*.attention.w'\]='colwise': the model has no such module",
        ),
        (
            {"blocks.*.norm": "colwise"},
            r"plan\['blocks.0.norm'\]='colwise': it is a LayerNorm, and the style needs Lin",
        ),
        ({"head": "columns"}, r"plan\['head'\]='columns': known styles are colwise, "),
        ({"layers.*": "block"}, r"plan\['layers.\*'\]='block': the model has no such module"),
    ],
)
def test_mistakes_in_a_plan_are_named(pool: WarmPool, plan: dict[str, str], message: str) -> None:
    with pytest.raises(RankFailedError, match=message):
        run_steps(pool, LAYOUTS["tp2"], plan=plan)


class SmallTables(nn.Module):
    """A model with layers that have fewer rows or channels than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.types, self.kinds = nn.Embedding(VOCABULARY, 24), nn.Embedding(2, 24), nn.Embedding(4, 2)
        self.lift, self.narrow, self.head = nn.Linear(2, 24), nn.Linear(24, 2), nn.Linear(2, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.types(tokens % 2) + self.lift(self.kinds(tokens % 4))
        return self.head(torch.tanh(self.narrow(x)))


def build_small_tables(config: Config) -> nn.Module:
    return SmallTables()


@pytest.mark.parametrize("words", [LAYOUTS["tp3"], ["cluster.workers=6", "parallel.tp=3", "parallel.zero=3"]])
def test_layers_with_fewer_rows_than_ranks_stay_whole(pool: WarmPool, words: list[str]) -> None:
    plan = {"table": "embedding_rowwise", "types": "embedding_rowwise", "kinds": "embedding_colwise"}
    plan["narrow"] = "colwise_gather_output"
    expected = run_steps(pool, [], build_small_tables, None)
    assert run_steps(pool, words, build_small_tables, plan) == [pytest.approx(step, rel=1e-11) for step in expected]


def test_uneven_channels_are_refused(pool: WarmPool) -> None:
    with pytest.raises(
        RankFailedError, match="plan: blocks.0.down has 36 channels, which parallel.tp=5 does not divide"
    ):
        run_steps(pool, ["cluster.workers=5", "parallel.tp=5"], plan={"blocks.*.down": "rowwise"})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("parallel.tp=2", "needs a plan for tensor parallelism"),
        ("parallel.cp=2", "only the built-in decoder's attention"),
        ("parallel.pp=2", "only the built-in decoder can be split into stages"),
    ],
)
def test_axes_that_a_module_cannot_have_are_refused_in_one_line(tmp_path: Path, setting: str, message: str) -> None:
    config = make_small_config(tmp_path / "run", "cluster.workers=2", setting)
    with pytest.raises(LayoutError, match=f"^{setting} .*{message}.*; set it to 1"):
        train(config, model=build, loss=custom_module.loss, quiet=True)
    with pytest.raises(ModelError, match="known styles"):
        train(make_small_config(tmp_path / "x"), model=build, loss=custom_module.loss, plan={"a": "b"}, quiet=True)
