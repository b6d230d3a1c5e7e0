"""The planner against published layouts and throughputs."""

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

# Hugging Face 2025, "The Ultra-Scale Playbook": the best of all layouts tried on nodes of eight H100, with a million
# tokens per step in sequences of 4096. Billions of parameters, nodes, model FLOPs utilization in percent (full
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
MODELS = {
    1.34: ["model.hidden_size=2048", "model.num_layers=16", "model.ffn_size=8192", "model.tie_embeddings=true"],
    8.86: ["model.hidden_size=4096", "model.num_layers=32", "model.ffn_size=14336", "model.tie_embeddings=false"],
}
SEARCH_OVERRIDES = [
    *("model.num_heads=32", "model.vocab_size=131072", "train.seq_len=4096", "train.global_batch_size=256"),
    *("train.dtype=bf16", "parallel.pp_schedule=1f1b", "parallel.activation_checkpointing=none", "parallel.zero=[0,1]"),
    *("parallel.cp=1", "parallel.ep=1", "parallel.tp=auto", "parallel.pp=auto"),
]


@dataclass(frozen=True)
class Row:
    """A published best layout, and the number of layouts that are predicted to be faster."""

    name: tuple[float, int]
    published: float  # MFU in percent, full attention
    predicted: float
    estimate: Estimate
    num_faster: int
    num_fitting: int
    slowdown: float  # relative to the predicted best


def make_config(size: float) -> Config:
    return load_config(None, [*MODELS[size], *SEARCH_OVERRIDES, "train.compile=false"])  # as published


@cache
def build_rows() -> list[Row]:
    rows = []
    for size, nodes, mfu, dp, tp, pp, grad_acc, micro_batch_size, zero in ULTRASCALE:
        config, cluster = make_config(size), make_machine("h100", nodes, 8)
        spec = resolve_model_spec(config.model, vocab_size=None, seq_len=4096)
        estimates = rank_layouts(config, spec, cluster, Calibration(), build_search_space(config, has_accelerator=True))
        best = (dp, tp, pp, grad_acc, micro_batch_size, zero)
        [published] = [published for published in estimates if get_coordinates(published) == best]
        fitting = [estimate for estimate in estimates if estimate.fits]
        cost = CostModel(make_workload(config, spec), cluster, Calibration())
        predicted = 100 * cost.compute_mfu(published.step_s, causal=False)
        num_faster = sum(estimate.step_s < published.step_s for estimate in fitting)
        rows.append(
            Row(
                (size, nodes),
                mfu,
                predicted,
                published,
                num_faster,
                len(fitting),
                published.step_s / fitting[0].step_s - 1,
            )
        )
    return rows


def get_coordinates(estimate: Estimate) -> tuple[int, ...]:
    layout = estimate.choice.layout
    batching = estimate.choice.microbatches_per_rank, estimate.choice.batching.size
    return layout.dp_size, layout.tp, layout.pp, *batching, layout.zero


def test_every_published_best_layout_is_legal_and_fits() -> None:
    assert [row.name for row in build_rows() if not row.estimate.fits or row.estimate.memory_gib > 80] == []


def test_published_throughputs_are_predicted() -> None:
    errors = [abs(row.predicted / row.published - 1) for row in build_rows()]
    assert median(errors) <= 0.12
    assert compute_spearman([row.predicted for row in build_rows()], [row.published for row in build_rows()]) >= 0.9


def test_published_best_layouts_are_predicted_to_be_among_the_best() -> None:
    assert sum(row.slowdown <= 0.15 for row in build_rows()) >= 11
    # An eighth of the distinct layouts: with ZeRO over one rank counted twice, these were within a tenth.
    assert sum(row.num_faster < row.num_fitting / 8 for row in build_rows()) >= 12


def compute_spearman(a: list[float], b: list[float]) -> float:
    """Return the rank correlation (Spearman 1904) of values without ties."""
    of_a, of_b = ([sorted(values).index(value) for value in values] for values in (a, b))
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(of_a, of_b, strict=True)) / (n * (n * n - 1))


# Narayanan et al. 2021 (arXiv 2104.04473), table 1: GPT of vocabulary 51,200 in sequences of 2048 on nodes of eight
# A100, full recomputation. Heads, width, layers, tp, pp, GPUs, batch, TFLOP/s per GPU including recomputation.
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


def test_another_published_table_is_predicted_without_recalibration() -> None:
    """Older devices, another network and other software: rates are met within a third, half of them within a fifth."""
    errors = []
    for heads, width, layers, tp, pp, gpus, batch, published in MEGATRON:
        size_overrides = [f"model.num_heads={heads}", f"model.hidden_size={width}", f"model.num_layers={layers}"]
        parallel_overrides = [
            f"parallel.tp={tp}",
            f"parallel.pp={pp}",
            "parallel.zero=0",
            "parallel.cp=1",
            "parallel.activation_checkpointing=full",
        ]
        architecture = [
            "model.activation=gelu",
            "model.position_embedding=learned",
            "model.norm=layernorm",
            "model.vocab_size=51200",
        ]
        data = [f"train.global_batch_size={batch}", "train.seq_len=2048", "train.dtype=bf16", "train.compile=false"]
        config, cluster = (
            load_config(None, [*size_overrides, *parallel_overrides, *architecture, *data]),
            make_machine("a100", gpus // 8, 8),
        )
        spec = resolve_model_spec(config.model, vocab_size=None, seq_len=2048)
        best = rank_layouts(config, spec, cluster, Calibration(), {"micro_batch_size": [1, 2, 4, 8]})[0]
        # 96 B s L h^2 (1 + s/6h + V/16Lh), as the paper counts.
        flops = 96 * batch * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
        errors.append(flops / best.step_s / gpus / 1e12 / published - 1)
    assert median(map(abs, errors)) <= 0.2 and max(map(abs, errors)) <= 0.33, errors


@pytest.mark.parametrize("nodes", [1, 8])
def test_a_wrong_calibration_changes_the_prediction(nodes: int) -> None:
    config, cluster = make_config(8.86), make_machine("h100", nodes, 8)
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=4096)
    slow = rank_layouts(
        config, spec, cluster, Calibration(efficiency=0.29), build_search_space(config, has_accelerator=True)
    )
    fast = rank_layouts(config, spec, cluster, Calibration(), build_search_space(config, has_accelerator=True))
    assert slow[0].step_s > 1.6 * fast[0].step_s
