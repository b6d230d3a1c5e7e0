"""train.deterministic=elastic: every data-parallel degree and ZeRO stage has the same bits as one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from examples import custom_module
from raytrain_hpc.errors import ConfigError, LayoutError
from raytrain_hpc.optim.grad_norm import ExactGradientNorm
from raytrain_hpc.optim.whole_vectors import run_on_whole_vectors
from raytrain_hpc.parallel.pairwise_sum import PairwiseSum, list_open_nodes, sum_pairwise
from raytrain_hpc.planner.layout import check_axes
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.training.elastic_runs import LAYOUTS, MODELS, RunOnce, run_bits, run_through_layouts
from tests.training.normalized_bigram import build_normalized_bigram
from tests.training.scaled_blocks import build_scaled_blocks
from tests.warm_pool import WarmPool, make_small_config

OTHER_AXES = {
    **LAYOUTS,
    "one microbatch": ["cluster.workers=1"],
    "tp: ddp-3": ["cluster.workers=6"],
    "tp: zero3-2": ["cluster.workers=4", "parallel.zero=3"],
    "cp: ddp-2": ["cluster.workers=4"],
    "cp: zero2-2": ["cluster.workers=4", "parallel.zero=2"],
    "pp: ddp-3": ["cluster.workers=6", "parallel.pp_schedule=gpipe"],
    "pp: zero3-2": ["cluster.workers=4", "parallel.zero=3"],
    "ep: 2 of ddp-2": ["cluster.workers=2", "parallel.ep=2"],
    "ep: 2 of ddp-4": ["cluster.workers=4", "parallel.ep=2"],
    "ep: 3 of zero2-3": ["cluster.workers=3", "parallel.ep=3", "parallel.zero=2"],
    "ep: 2 of zero1-4": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=1"],
    "ep: 2 of zero3-4": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=3"],
    "ep: 2 of hsdp3-2x2": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=3", "parallel.dp_replicate=2"],
    "ep: cp": ["cluster.workers=4", "parallel.ep=2"],
    "ep: cp x dp": ["cluster.workers=4", "parallel.ep=4"],
    "ep: cp x zero3": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=3"],
    "ep: pp": ["cluster.workers=4", "parallel.ep=2"],
    "ep: pp x zero2": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=2"],
    "ep: tp": ["cluster.workers=4", "parallel.ep=2"],
}
SPLIT = {
    "zbv": ["parallel.pp=2", "parallel.pp_schedule=zbv", "model.num_layers=4"],
    "interleaved_zero_bubble": [
        "parallel.pp=2",
        "parallel.pp_schedule=interleaved_zero_bubble",
        "model.num_layers=4",
        "train.micro_batch_size=1",
    ],
}

ZERO3_FLOAT8 = ["parallel.zero=3", "train.dtype=float8"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_degree_and_stage_gives_the_same_bits(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str
) -> None:
    assert run_bits(pool, tmp_path, *MODELS["gpt2"], *LAYOUTS[layout]) == run_once(*MODELS["gpt2"])


@pytest.mark.parametrize(
    ("model", "overrides", "layout"),
    [
        ("moe", [], "zero3-4"),
        ("moe", [], "ddp-3"),
        ("llama", ["train.dtype=bf16"], "ddp-5"),
        ("llama", ["train.micro_batch_size=12"], "one microbatch"),
        ("llama", ["parallel.tp=2"], "tp: ddp-3"),
        ("llama", ["parallel.tp=2"], "tp: zero3-2"),
        ("llama", ["parallel.cp=2"], "cp: ddp-2"),
        ("llama", ["parallel.cp=2"], "cp: zero2-2"),
        ("gpt2", ["parallel.pp=2"], "pp: ddp-3"),
        ("gpt2", ["parallel.pp=2"], "pp: zero3-2"),
        ("moe", [], "ep: 2 of ddp-2"),
        ("moe", [], "ep: 2 of ddp-4"),
        ("moe", [], "ep: 3 of zero2-3"),
        ("moe", [], "ep: 2 of zero1-4"),
        ("moe", [], "ep: 2 of zero3-4"),
        ("moe", [], "ep: 2 of hsdp3-2x2"),
        ("moe", ["train.dtype=bf16", "parallel.ep=2", "parallel.zero=3"], "ep: 2 of zero3-4"),
        ("moe", ["parallel.cp=2"], "ep: cp"),
        ("moe", ["parallel.cp=2"], "ep: cp x dp"),
        ("moe", ["parallel.cp=2"], "ep: cp x zero3"),
        ("moe", ["parallel.tp=2"], "ep: tp"),
        ("moe", SPLIT["zbv"], "ep: pp"),
        ("moe", SPLIT["zbv"], "ep: pp x zero2"),
        ("gpt2", SPLIT["zbv"], "pp: zero3-2"),
        ("gpt2", SPLIT["interleaved_zero_bubble"], "pp: ddp-3"),
        ("llama", ["train.dtype=bf16", "parallel.zero=1"], "zero1-4"),
        ("llama", ["train.dtype=bf16", "parallel.zero=2", "optimizer.name=muon"], "hsdp2-2x2"),
        ("gpt2", ["train.dtype=bf16", "parallel.zero=3"], "zero3-5, recompute"),
        ("gpt2", ["train.dtype=bf16", "parallel.zero=3", "train.compile=true"], "zero3-4"),
        ("llama", ["train.dtype=float8", "parallel.zero=3", "lora.rank=2"], "zero3-4"),
        ("moe", ["train.dtype=float8", "parallel.zero=2"], "zero2-3"),
        ("moe", ["train.dtype=bf16", "parallel.zero=3"], "ep: 3 of zero2-3"),
        ("llama", ["train.dtype=bf16", "parallel.zero=3", "parallel.tp=2"], "tp: zero3-2"),
        ("gpt2", ["train.dtype=bf16", "parallel.zero=3", *SPLIT["zbv"]], "pp: zero3-2"),
        ("llama", ["parallel.quantize=weights", "parallel.zero=2"], "hsdp2-2x2"),
        ("moe", ["parallel.quantize=weights", "parallel.zero=1", "train.dtype=bf16"], "zero1-4"),
        ("gpt2", ["parallel.tile_mib=0.001", "parallel.zero=3"], "zero3-5, recompute"),
        ("llama", ["parallel.tile_mib=0.001", "parallel.quantize=weights", *ZERO3_FLOAT8], "zero3-4"),
    ],
)
def test_every_other_axis_gives_the_same_bits_at_any_dp_degree(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, model: str, overrides: list[str], layout: str
) -> None:
    """Compare with a run on one rank, or two of that axis only."""
    num_ranks = 2 if {"parallel.tp=2", "parallel.cp=2", "parallel.pp=2", "parallel.ep=2"}.intersection(overrides) else 1
    base = [*MODELS[model], *overrides, f"cluster.workers={num_ranks}"]
    assert run_bits(pool, tmp_path, *base, *OTHER_AXES[layout]) == run_once(*base)


def test_bits_differ_without_elastic_determinism(pool: WarmPool, run_once: RunOnce, tmp_path: Path) -> None:
    """The comparison above can detect a difference."""
    bits = run_bits(pool, tmp_path / "ddp", *MODELS["gpt2"], *LAYOUTS["ddp-3"], "train.deterministic=true")
    assert bits[1] != run_once(*MODELS["gpt2"])[1]
    assert bits[0] != run_once(*MODELS["gpt2"])[0]


def test_running_statistics_have_the_same_bits(pool: WarmPool, tmp_path: Path) -> None:
    """Validation uses them; ranks have several and unequally many microbatches."""
    custom = CustomModel(build_normalized_bigram, custom_module.loss)
    single, *others = (
        run_bits(pool, tmp_path / layout, *overrides, custom=custom)
        for layout, overrides in {"single": [], **{key: LAYOUTS[key] for key in ("ddp-2", "zero3-4")}}.items()
    )
    assert len(single[0][2]) == 3, "the third step has a validation loss"
    assert others == [single] * 2


def test_run_that_changes_its_dp_degree_keeps_the_bits(pool: WarmPool, run_once: RunOnce, tmp_path: Path) -> None:
    losses, digest = run_through_layouts(pool, tmp_path, *MODELS["gpt2"])
    expected, expected_digest = run_once(*MODELS["gpt2"])
    assert losses == [step[0] for step in expected] and digest == expected_digest


def test_module_of_a_user_in_bf16_has_the_same_bits_with_one_shard_and_several(pool: WarmPool, tmp_path: Path) -> None:
    """Its units get floating-point inputs in bf16, which also one that is not sharded has to cast."""
    custom, words = CustomModel(build_scaled_blocks, custom_module.loss), ["train.dtype=bf16", "parallel.zero=3"]
    single, *others = (
        run_bits(pool, tmp_path / layout, *words, *overrides, custom=custom)
        for layout, overrides in {"single": [], **{key: LAYOUTS[key] for key in ("zero3-4", "hsdp2-2x2")}}.items()
    )
    assert others == [single] * 2


def test_weights_cannot_be_read_in_fp32_if_shards_are_gathered_in_bf16() -> None:
    words = ["train.deterministic=elastic", "train.dtype=bf16", "train.weight_copies=false"]
    make_small_config(None, *words)
    with pytest.raises(ConfigError, match="train.weight_copies=False .* a single shard .* parallel.zero=0"):
        make_small_config(None, *words, "parallel.zero=1")


@pytest.mark.parametrize("schedule", SPLIT)
def test_schedules_that_split_backward_passes_have_the_bits_of_those_that_do_not(
    run_once: RunOnce, schedule: str
) -> None:
    words = [*MODELS["gpt2"], *SPLIT[schedule], "cluster.workers=2"]
    assert run_once(*words) == run_once(*words, "parallel.pp_schedule=1f1b")


def test_quantized_gradients_are_refused() -> None:
    """Rounding is not linear: what a rank rounds is the sum over its own microbatches."""
    words = ["cluster.workers=4", "parallel.zero=2", "parallel.quantize=gradients", "train.deterministic=elastic"]
    with pytest.raises(LayoutError, match=r"rounds the sum .* parallel.quantize=weights"):
        check_axes(make_small_config(None, *words))
    words = ["parallel.zero=2", "parallel.quantize=weights", "parallel.ep=2", "model.num_experts=4"]
    with pytest.raises(LayoutError, match=r"those of experts depend on the number of ranks; use parallel.ep=1"):
        check_axes(make_small_config(None, *words, "train.deterministic=elastic"))
    with pytest.raises(ConfigError, match="needs true, false or elastic"):
        make_small_config(None, "train.deterministic=exact")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 12, 13])
def test_pairwise_sum_does_not_depend_on_the_partition(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, 9, generator=generator) * 10.0 ** torch.arange(-4, 5)
    level = list(values)
    while len(level) > 1:
        level = [level[i] + level[i + 1] if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    assert torch.equal(sum_pairwise(values), level[0])
    for ranks in range(1, count + 1):
        contiguous = [range(rank * count // ranks, (rank + 1) * count // ranks) for rank in range(ranks)]
        for partition in (contiguous, [range(rank, count, ranks) for rank in range(ranks)]):
            tree = PairwiseSum(count)
            for leaves in partition:
                rank_sum = PairwiseSum(count)
                for leaf in reversed(leaves):
                    rank_sum.add(values[leaf].clone(), (0, leaf))
                assert sorted(rank_sum.open_nodes) == list_open_nodes(leaves, count)
                if partition is contiguous:  # open nodes grow with the logarithm of the number of leaves
                    assert len(rank_sum.open_nodes) <= 2 * len(leaves).bit_length()
                for node in rank_sum.open_nodes:
                    tree.add(rank_sum.open_nodes[node].clone(), node)
            assert tree.total is not None and torch.equal(tree.total, level[0])


def test_parameters_in_another_memory_order_are_updated_alike() -> None:
    """Sizes that are no whole vectors: the ends of the memory are other elements than those of the tensor."""
    generator = torch.Generator().manual_seed(3)
    operands = [torch.randn(5, 7, generator=generator) for _ in range(3)]
    expected = [x + 2.0 for x in operands]
    transposed = [[x.t().contiguous().t()] for x in operands]
    run_on_whole_vectors(lambda lists: [x.add_(2.0) for tensors in lists for x in tensors], transposed)
    assert all(torch.equal(x, wanted) for (x,), wanted in zip(transposed, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_is_exact_and_does_not_depend_on_the_partition(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    scales = 10.0 ** torch.randint(-9, 3, (5000,), generator=generator)
    tensor = torch.randn(5000, generator=generator, dtype=dtype) * scales
    norms = set()
    for cuts in ([5000], [1, 4999], [1700, 33, 3267], [1] * 5000):
        pieces = {str(i): piece for i, piece in enumerate(torch.split(tensor, cuts))}
        norms.add(ExactGradientNorm({name: [None] for name in pieces}, None, tensor.device)(pieces).item())
    (norm,) = norms
    assert norm == pytest.approx(float(math.sqrt(math.fsum(x * x for x in tensor.double().tolist()))), rel=1e-12)
    for nonfinite in (math.nan, math.inf):
        broken = {"0": torch.tensor([1.0, nonfinite])}
        assert not math.isfinite(ExactGradientNorm({"0": [None]}, None, tensor.device)(broken).item())
    assert ExactGradientNorm({"0": [None]}, None, tensor.device)({"0": torch.zeros(3)}).item() == 0.0
