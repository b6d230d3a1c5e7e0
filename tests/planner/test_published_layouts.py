"""The planner against layouts and rates that others have measured and published."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.cost_model import CostModel
from raytrain_hpc.planner.hardware import make_machine
from raytrain_hpc.planner.search import Estimate, rank_layouts
from raytrain_hpc.planner.search_space import build_search_space
from raytrain_hpc.planner.workload import make_workload

# Hugging Face 2025, "The Ultra-Scale Playbook": the best of all layouts that were tried on nodes of eight H100, with a
# million tokens a step in sequences of 4096. Billions of parameters, nodes, model FLOPs utilisation in per cent (full
# attention), dp, tp, pp, gradient accumulation, microbatch, ZeRO stage.
ULTRASCALE = (
    (1.34, 1, 44.32, 4, 1, 2, 16, 4, 1),
    (1.34, 2, 41.59, 8, 1, 2, 32, 1, 1),
    (1.34, 4, 38.38, 16, 1, 2, 16, 1, 1),
    (1.34, 8, 32.47, 32, 1, 2, 8, 1, 1),
    (1.34, 16, 29.46, 64, 2, 1, 1, 4, 0),
    (1.34, 32, 23.20, 64, 4, 1, 1, 4, 0),
    (1.34, 64, 5.25, 128, 2, 2, 1, 2, 1),
    (8.86, 1, 45.22, 2, 1, 4, 128, 1, 1),
    (8.86, 2, 43.94, 4, 4, 1, 16, 4, 1),
    (8.86, 4, 43.31, 16, 1, 2, 16, 1, 1),
    (8.86, 8, 39.50, 32, 1, 2, 8, 1, 1),
    (8.86, 16, 36.33, 16, 8, 1, 2, 8, 0),
    (8.86, 32, 32.71, 32, 8, 1, 1, 8, 0),
    (8.86, 64, 18.69, 128, 4, 1, 1, 2, 0),
)
SHAPES = {
    1.34: ["model.hidden_size=2048", "model.num_layers=16", "model.ffn_size=8192", "model.tie_embeddings=true"],
    8.86: ["model.hidden_size=4096", "model.num_layers=32", "model.ffn_size=14336", "model.tie_embeddings=false"],
}
SEARCHED = [
    *("model.num_heads=32", "model.vocab_size=131072", "train.seq_len=4096", "train.global_batch=256"),
    *("train.dtype=bf16", "parallel.schedule=1f1b", "parallel.recompute=none", "parallel.zero=[0,1]"),
    *("parallel.cp=1", "parallel.ep=1", "parallel.tp=auto", "parallel.pp=auto"),
]


@dataclass(frozen=True)
class Row:
    """A published best, and where it stands among all that fit."""

    name: tuple[float, int]
    published: float  # MFU in per cent, full attention
    predicted: float
    one: Estimate
    place: int
    fitting: int
    slower: float  # than the predicted best


def settings(size: float) -> Config:
    return load_config(None, [*SHAPES[size], *SEARCHED])


@cache
def rows() -> list[Row]:
    found = []
    for size, nodes, mfu, dp, tp, pp, turns, micro, zero in ULTRASCALE:
        config, cluster = settings(size), make_machine("h100", nodes, 8)
        shape = resolve_model_spec(config.model, vocab_size=None, seq_len=4096)
        estimates = rank_layouts(
            config, shape, cluster, Calibration(), build_search_space(config, has_accelerator=True)
        )
        best = (dp, tp, pp, turns, micro, zero)
        [one] = [one for one in estimates if coordinates(one) == best]
        fitting = [other for other in estimates if other.fits]
        cost = CostModel(make_workload(config, shape), cluster, Calibration())
        predicted = 100 * cost.compute_mfu(one.step_s, causal=False)
        place = sum(other.step_s < one.step_s for other in fitting)
        found.append(Row((size, nodes), mfu, predicted, one, place, len(fitting), one.step_s / fitting[0].step_s - 1))
    return found


def coordinates(one: Estimate) -> tuple[int, ...]:
    layout = one.choice.layout
    cut = one.choice.microbatches_per_rank, one.choice.batching.size
    return layout.dp_size, layout.tp, layout.pp, *cut, layout.zero


def test_every_published_best_is_legal_and_fits() -> None:
    assert [row.name for row in rows() if not row.one.fits or row.one.memory_gib > 80] == []


def test_published_rates_are_predicted() -> None:
    errors = [abs(row.predicted / row.published - 1) for row in rows()]
    assert median(errors) <= 0.12
    assert spearman([row.predicted for row in rows()], [row.published for row in rows()]) >= 0.9


def test_published_bests_are_among_the_predicted_bests() -> None:
    assert sum(row.slower <= 0.15 for row in rows()) >= 11
    assert sum(row.place < row.fitting / 10 for row in rows()) >= 12


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation (Spearman 1904), of values of which no two are the same."""
    of_a, of_b = ([sorted(side).index(one) for one in side] for side in (a, b))
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(of_a, of_b, strict=True)) / (n * (n * n - 1))


# Narayanan et al. 2021 (arXiv 2104.04473), table 1: GPT of vocabulary 51,200 in sequences of 2048 on nodes of eight
# A100, all activations recomputed. Heads, width, layers, tp, pp, GPUs, batch, TFLOP/s a GPU, recomputation counted.
MEGATRON = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def test_another_published_table_without_another_calibration() -> None:
    """Older devices, another network and other software: what is published is met within a third, and half within a
    fifth."""
    errors = []
    for heads, width, layers, tp, pp, gpus, batch, published in MEGATRON:
        sizes = [f"model.num_heads={heads}", f"model.hidden_size={width}", f"model.num_layers={layers}"]
        cut = [f"parallel.tp={tp}", f"parallel.pp={pp}", "parallel.zero=0", "parallel.cp=1", "parallel.recompute=full"]
        kind = ["model.activation=gelu", "model.positions=learned", "model.norm=layernorm", "model.vocab_size=51200"]
        data = [f"train.global_batch={batch}", "train.seq_len=2048", "train.dtype=bf16"]
        config, cluster = load_config(None, [*sizes, *cut, *kind, *data]), make_machine("a100", gpus // 8, 8)
        shape = resolve_model_spec(config.model, vocab_size=None, seq_len=2048)
        best = rank_layouts(config, shape, cluster, Calibration(), {"micro_batch": [1, 2, 4, 8]})[0]
        # 96 B s L h^2 (1 + s/6h + V/16Lh), as the paper counts.
        flops = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        errors.append(flops / best.step_s / gpus / 1e12 / published - 1)
    assert median(map(abs, errors)) <= 0.2 and max(map(abs, errors)) <= 0.33, errors


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_wrong_calibration_is_seen(nodes: int) -> None:
    config, cluster = settings(8.86), make_machine("h100", nodes, 8)
    shape = resolve_model_spec(config.model, vocab_size=None, seq_len=4096)
    slow = rank_layouts(
        config, shape, cluster, Calibration(efficiency=0.29), build_search_space(config, has_accelerator=True)
    )
    fast = rank_layouts(config, shape, cluster, Calibration(), build_search_space(config, has_accelerator=True))
    assert slow[0].step_s > 1.6 * fast[0].step_s
