"""Muon under every layout against plain code on whole matrices, and against torch.optim.Muon."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from examples import custom_module
from raytrain_hpc.config.schema import Config, OptimizerConfig
from raytrain_hpc.optim.matrix_exchange import Matrix, MatrixExchange, assign_owners
from raytrain_hpc.optim.muon import Muon
from raytrain_hpc.optim.newton_schulz import orthogonalize, orthogonalize_each
from raytrain_hpc.optim.offload import CpuOffload, OnDevice
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.state.shard_index import Box, StateIndex, TensorSlices
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
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
from tests.parallel.layout_run import GPT2, LLAMA, ODD, load_full_state
from tests.training import elastic_runs
from tests.training.elastic_runs import RunOnce, run_bits, run_through_layouts
from tests.training.generations import train_with_changed_ranks
from tests.warm_pool import RankFailedError, WarmPool, make_small_config

MUON = "optimizer.name=muon"
MODELS = {
    "gpt2": [*GPT2, *ODD, "model.tie_embeddings=true"],
    "llama": [*LLAMA, *ODD, "model.num_kv_heads=1", "model.tie_embeddings=false"],
    "moe": [*LLAMA, *ODD, "model.num_kv_heads=2", "model.num_experts=5", "model.shared_expert_size=23"],
}
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, MOMENTUM = 3e-3, 0.9, 0.95, 1e-8, 0.1, 0.95


def orthogonalize_plainly(matrix: Tensor) -> Tensor:
    """Apply the quintic polynomial of Jordan et al. five times, without transposing or batching."""
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


class PlainMuon:
    """Muon for matrices in layers, expert by expert, and AdamW for the rest, on whole parameters."""

    def __init__(self, parameters: Parameters):
        self.momenta = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.second_momenta = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        self.num_steps = 0

    def __call__(self, parameters: Parameters) -> None:
        self.num_steps += 1
        for name, weight in parameters.items():
            assert weight.grad is not None
            weight *= 1 - LR * (WEIGHT_DECAY if weight.ndim >= 2 else 0.0)
            if name.startswith("layers.") and weight.ndim >= 2:
                self.update_matrices(name, weight, weight.grad)
            else:
                self.update_adamw(name, weight, weight.grad)

    def update_matrices(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        self.momenta[name] = MOMENTUM * self.momenta[name] + (1 - MOMENTUM) * gradient
        update = MOMENTUM * self.momenta[name] + (1 - MOMENTUM) * gradient
        matrices = update if weight.ndim == 3 else update[None]
        whole = torch.stack([orthogonalize_plainly(matrix) for matrix in matrices]).view_as(weight)
        weight -= LR * 0.2 * sqrt(max(weight.shape[-2:])) * whole

    def update_adamw(self, name: str, weight: Tensor, gradient: Tensor) -> None:
        self.momenta[name] = BETA1 * self.momenta[name] + (1 - BETA1) * gradient
        self.second_momenta[name] = BETA2 * self.second_momenta[name] + (1 - BETA2) * gradient**2
        mean = self.momenta[name] / (1 - BETA1**self.num_steps)
        variance = self.second_momenta[name] / (1 - BETA2**self.num_steps)
        weight -= LR * mean / (variance.sqrt() + EPS)


def make_plain_muon(parameters: Parameters) -> Update:
    return PlainMuon(parameters)


@pytest.fixture(scope="module")
def references() -> dict[str, dict[str, Tensor]]:
    return {
        model: train_dense(make_small_config(None, *BASE, *words), make_plain_muon) for model, words in MODELS.items()
    }


CASES = [
    *product(["llama"], [layout for layout in LAYOUTS if "ep" not in layout]),
    *product(["gpt2"], ["ddp-2", "zero3-3", "tp-2", "tp-2 zero3-2", "pp-2", "pp-2 zero2-2"]),
    *product(["moe"], ["ddp-2", "zero3-3", "hsdp-2x2", "tp-2", "pp-2", "ep-2", "ep-2 zero3-4"]),
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_every_layout_agrees_with_plain_code_on_whole_matrices(
    pool: WarmPool, references: Any, tmp_path: Path, model: str, layout: str
) -> None:
    state = train_layout(pool, tmp_path, MUON, *MODELS[model], *LAYOUTS[layout])
    assert measure_difference(select_weights(state), references[model]) < 1e-11
    kinds = {
        name: {n.split(".")[1] for n in state if n.startswith("optim") and n.endswith(f".{name}")}
        for name in references[model]
    }
    for name, tensor in references[model].items():
        is_matrix = name.startswith("layers.") and tensor.ndim >= 2
        assert kinds[name] == ({"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq"})


@pytest.mark.parametrize("layout", ["ddp-2", "ddp-5", "zero1-2", "zero2-3", "zero3-4", "hsdp2-2x2"])
def test_elastic_runs_have_the_bits_of_one_process(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str
) -> None:
    words = [MUON, *elastic_runs.MODELS["gpt2"]]
    assert run_bits(pool, tmp_path, *words, *elastic_runs.LAYOUTS[layout]) == run_once(*words)


@pytest.mark.parametrize(
    ("model", "words", "more"),
    [
        ("moe", ["cluster.workers=1"], elastic_runs.LAYOUTS["zero3-4"]),
        ("llama", ["parallel.tp=2", "cluster.workers=4"], ["parallel.zero=3"]),
    ],
    ids=["experts", "tp"],
)
def test_elastic_runs_with_experts_or_tensor_parallelism_have_the_same_bits(
    pool: WarmPool, tmp_path: Path, model: str, words: list[str], more: list[str]
) -> None:
    words = [MUON, *elastic_runs.MODELS[model], *words]
    assert run_bits(pool, tmp_path / "a", *words) == run_bits(pool, tmp_path / "b", *words, *more)


def test_a_run_that_changes_its_layout_keeps_the_bits(pool: WarmPool, run_once: RunOnce, tmp_path: Path) -> None:
    words = [MUON, *elastic_runs.MODELS["gpt2"]]
    losses, digest = run_through_layouts(pool, tmp_path, *words)
    expected, expected_digest = run_once(*words)
    assert losses == [step[0] for step in expected] and digest == expected_digest


def test_momentum_is_recovered_from_the_memory_of_other_ranks(pool: WarmPool, tmp_path: Path) -> None:
    losses, undisturbed = train_with_changed_ranks(pool, tmp_path, MUON)
    assert losses == undisturbed


@pytest.mark.parametrize("shape", [(33, 50), (50, 33), (40, 40)])
def test_steps_agree_with_torch(shape: tuple[int, int]) -> None:
    """torch computes the iteration in bf16, whatever the dtype of the weights: a few units of its rounding."""
    generator = torch.Generator().manual_seed(1)
    own, other = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    config = OptimizerConfig(name="muon", lr=LR)
    muon = Muon({"w": own}, config, {"w": shape}, elastic=False)
    muon.connect(*make_local_exchange(muon))
    reference = torch.optim.Muon([other], lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        own.grad, other.grad = gradient.clone(), gradient.clone()
        muon.step(LR)
        reference.step()
    assert torch.equal(muon.moments["momentum_buffer"]["w"], reference.state[other]["momentum_buffer"])
    change, difference = (
        float((weight.detach() - base).norm()) for weight, base in ((other, 1), (own, other.detach()))
    )
    assert difference < 4 * torch.finfo(torch.bfloat16).eps * change


def make_local_exchange(muon: Muon) -> tuple[MatrixExchange, Any]:
    def make_shards(updates: Any) -> ShardedState:
        return ShardedState(StateShard.from_tensor(name, tensor) for name, tensor in updates.items())

    index = make_shards(muon.moments["momentum_buffer"]).to_index()
    return MatrixExchange([index], [0], 0, None, torch.device("cpu")), make_shards


def test_iteration_agrees_with_plain_code_and_leads_to_an_orthogonal_matrix() -> None:
    generator = torch.Generator().manual_seed(2)
    for shape in ((7, 20), (20, 7), (1, 9), (16, 16)):
        batch = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
        result = orthogonalize(batch)
        expected = torch.stack([orthogonalize_plainly(matrix) for matrix in batch])
        assert float((result - expected).abs().max()) < 1e-12
        values = torch.linalg.svdvals(result)
        assert float(values.min()) > 0.3 and float(values.max()) < 1.3
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


def test_batches_of_equal_shapes_give_the_same_up_to_rounding() -> None:
    generator = torch.Generator().manual_seed(3)
    matrices = [torch.randn(shape, generator=generator) for shape in [(5, 9), (9, 5), (5, 9), (4, 4)]]
    results = {batched: [matrix.clone() for matrix in matrices] for batched in (True, False)}
    for batched, copies in results.items():
        orthogonalize_each(copies, batched=batched)
    for together, alone in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_matrices_are_balanced_over_the_ranks_that_hold_them() -> None:
    shapes = [(64, 32), (32, 32), (128, 32), (32, 128)] * 12
    matrices = [Matrix(f"w{number}", shape, Box.from_shape(shape)) for number, shape in enumerate(shapes)]
    owners = assign_owners({matrix: range(5) for matrix in matrices})
    loads = [sum(matrix.cost for matrix in matrices if owners[matrix] == rank) for rank in range(5)]
    assert max(loads) - min(loads) <= max(matrix.cost for matrix in matrices)
    holders = {matrix: [0, 1, 2] if number % 2 else [2, 3] for number, matrix in enumerate(matrices)}
    owners = assign_owners(holders)
    assert all(owners[matrix] in holders[matrix] for matrix in matrices)
    assert set(owners.values()) == {0, 1, 2, 3}


@pytest.mark.parametrize("layout", ["rows", "rows and columns", "replicated rows", "stack", "replicas", "more ranks"])
def test_all_ranks_plan_the_same_transfers_of_every_element_once(layout: str) -> None:
    indexes, replicas = make_indexes(layout)
    plans = [MatrixExchange(indexes, replicas, rank, None, torch.device("cpu")) for rank in range(len(indexes))]
    assert len({len(plan.rounds) for plan in plans}) == 1
    received = []
    for number in range(len(plans[0].rounds)):
        rounds = [plan.rounds[number] for plan in plans]
        for source, destination in product(range(len(plans)), repeat=2):
            for kind in ("gathers", "scatters"):
                sent, expected = (
                    [
                        t
                        for t in getattr(rounds[rank], kind)
                        if (t.source_rank, t.destination_rank) == (source, destination)
                    ]
                    for rank in (source, destination)
                )
                assert sent == expected, "in the same order"
        for rank, current in enumerate(rounds):
            counts = {matrix: torch.zeros(matrix.shape) for matrix in current.own}
            for transfer in (t for t in current.gathers if t.destination_rank == rank):
                copy = transfer.region_copy
                (matrix,) = [m for m in current.own if m.name == copy.name and copy.region.intersection(m.box).numel]
                counts[matrix][copy.region.to_slices(Box.from_shape(matrix.shape))] += 1
                assert replicas[transfer.source_rank] == replicas[rank]
            for matrix, count in counts.items():
                inside = matrix.box.to_slices(Box.from_shape(matrix.shape))
                assert bool((count[inside] == 1).all()) and int(count.sum()) == matrix.box.numel
            received += [t for t in current.scatters if t.destination_rank == rank]
    sizes = sum(box.numel for index in indexes for tensor in index.values() for box in tensor.boxes)
    assert sum(t.region_copy.region.numel for t in received) == sizes, "every rank gets all that it holds"


def make_indexes(layout: str) -> tuple[list[StateIndex], list[int]]:
    """Return the boxes of a matrix of 7 x 5 on each rank, or of a stack of three, and the replica of each rank."""
    shape = (3, 7, 5) if layout == "stack" else (7, 5)
    boxes: list[list[Box]] = {
        "rows": [[Box((0, 0), (3, 5))], [Box((3, 0), (3, 5))], [Box((6, 0), (1, 5))]],
        "rows and columns": [[Box((r, c), (h, w))] for r, h in ((0, 4), (4, 3)) for c, w in ((0, 2), (2, 3))],
        # Two heads that both ranks hold whole, as with fewer heads than ranks.
        "replicated rows": [[Box((0, 0), (2, 5)), Box((4, 0), (3, 5))], [Box((2, 0), (2, 5)), Box((4, 0), (3, 5))]],
        "stack": [[Box((0, 0, 0), (2, 7, 5))], [Box((2, 0, 0), (1, 7, 5))]],
        "replicas": [[Box((0, 0), (4, 5))], [Box((4, 0), (3, 5))]] * 2,
        "more ranks": [[Box((row, 0), (1, 5))] for row in range(7)] + [[Box((7, 0), (0, 5))]],
    }[layout]
    replicas = [0, 0, 1, 1] if layout == "replicas" else [0] * len(boxes)
    names = ("a", "b", "c")
    return [StateIndex(TensorSlices(n, shape, "float32", tuple(held)) for n in names) for held in boxes], replicas


def test_a_model_without_repeated_blocks_is_refused(pool: WarmPool) -> None:
    with pytest.raises(RankFailedError, match=r"optimizer.name=muon: the model has no list of repeated blocks"):
        pool.train(make_small_config(None, MUON), custom=CustomModel(build_bigram, custom_module.loss))


class Block(nn.Module):
    """Two matrices with biases, a norm, and an embedding of its own."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 30), nn.Linear(30, 12)
        self.extra = nn.Embedding(vocab_size, 12)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) + self.extra(tokens)


class Residual(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, 12), nn.Linear(12, vocab_size)
        self.blocks = nn.ModuleList(Block(vocab_size) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, tokens)
        return self.head(x)


def build_residual(config: Config) -> nn.Module:
    return Residual(int(config.model.vocab_size))


def test_matrices_of_a_custom_model_are_those_of_its_repeated_blocks(pool: WarmPool, tmp_path: Path) -> None:
    custom, states = CustomModel(build_residual, custom_module.loss), []
    for layout in (["cluster.workers=1"], ["cluster.workers=3"], ["cluster.workers=3", "parallel.zero=3"]):
        config = make_small_config(tmp_path / str(len(states)), *BASE, MUON, *layout)
        pool.train(config, custom=custom)
        states.append(load_full_state(Path(config.run.dir), config.train.steps))
    assert all(measure_difference(state, states[0]) < 1e-11 for state in states)
    momenta = {name for name in states[0] if name.startswith("optimizer.momentum_buffer.")}
    weights = {f"blocks.{block}.{name}.weight" for block in range(2) for name in ("up", "down")}
    assert momenta == {f"optimizer.momentum_buffer.{name}" for name in weights}


def build_bigram(config: Config) -> nn.Module:
    return nn.Embedding(int(config.model.vocab_size), int(config.model.vocab_size))


@pytest.mark.parametrize("layout", ["zero3-3", "tp-2"])
def test_offload_to_disk_keeps_the_bits(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    words = [MUON, *MODELS["llama"], *LAYOUTS[layout]]
    offload = ["parallel.offload=disk", f"parallel.offload_dir={tmp_path}"]
    on_device = train_layout(pool, tmp_path / "device", *words)
    on_disk = train_layout(pool, tmp_path / "disk", *words, *offload)
    assert all(torch.equal(on_disk[name], tensor) for name, tensor in on_device.items())


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_offload_in_chunks_keeps_the_bits(chunk_bytes: int) -> None:
    config = make_small_config(None, MUON).optimizer
    generator = torch.Generator().manual_seed(0)
    initial, gradients = torch.randn(90, 70, generator=generator), torch.randn(3, 90, 70, generator=generator)
    results = []
    for make_storage in (OnDevice, partial(CpuOffload, chunk_bytes=chunk_bytes)):
        weight = nn.Parameter(initial.clone())
        muon = Muon({"w": weight}, config, {"w": (90, 70)}, elastic=False, make_storage=make_storage)
        muon.connect(*make_local_exchange(muon))
        for gradient in gradients:
            weight.grad = gradient.clone()
            muon.step(0.01)
        results.append((weight.detach(), muon.moments["momentum_buffer"]["w"]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
