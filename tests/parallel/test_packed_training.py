"""Packed and padded documents are trained as if each was in a separate sequence, on every layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raytrain_hpc.data.dataset.sources import open_dataset
from raytrain_hpc.data.loader.stream import open_stream
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.param_init import init_weights
from tests.data.dataset_writer import write_dataset
from tests.parallel.layout_run import GPT2, LLAMA, run_layout
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

MODELS = {
    "gpt2": [*GPT2, "model.tie_embeddings=true"],
    "llama": [*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false"],
}
LAYOUTS = {
    "dp-3": ["cluster.workers=3"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "ring-2 x tp-2": ["cluster.workers=4", "parallel.cp=2", "parallel.tp=2"],
    "ulysses-2": ["cluster.workers=2", "parallel.cp=2", "parallel.ulysses=2"],
    "zero3-2 x pp-2, zbv": [
        "cluster.workers=4",
        "parallel.pp=2",
        "parallel.pp_schedule=zbv",
        "parallel.zero=3",
        "model.num_layers=5",
    ],
    # A layer is recomputed when other microbatches, with other documents, have passed through it.
    "pp-2, gpipe, selective": [
        "cluster.workers=2",
        "parallel.pp=2",
        "parallel.pp_schedule=gpipe",
        "parallel.activation_checkpointing=selective",
        "model.num_layers=4",
    ],
}


EXPERTS = [*LLAMA, "model.num_kv_heads=2", "model.num_experts=5", "model.dropout=0"]
COMMON = ["train.seq_len=21", "model.vocab_size=64"]


def make_documents(shortest: int) -> dict[str, list[np.ndarray]]:
    """Return documents of both splits: several in most rows, and some that span rows."""
    generator = np.random.default_rng(5)
    return {
        name: [generator.integers(0, 64, size) for size in generator.integers(shortest, 30, number)]
        for name, number in (("train", 60), ("val", 9))
    }


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("documents")
    write_dataset(directory, make_documents(1), vocab_size=64, shard_tokens=100)
    return [f"data.path={directory}", "data.packing=documents", *COMMON]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the settings of a dataset of pairs, one per row: prompts of five tokens, without loss, and responses."""
    directory = tmp_path_factory.mktemp("pairs")
    write_dataset(directory, make_documents(7), vocab_size=64, shard_tokens=100, prompt=5)
    return [f"data.path={directory}", "data.packing=padded", *COMMON]


@pytest.mark.parametrize("model", MODELS)
def test_packed_loss_equals_that_of_separate_documents(
    pool: WarmPool, tmp_path: Path, words: list[str], model: str
) -> None:
    config = make_small_config(
        tmp_path, *words, *MODELS[model], "train.dtype=fp64", "train.steps=2", "cluster.workers=1"
    )
    metrics = get_step_metrics(pool.train(config)[0])
    decoder = Decoder(prepare_run(make_small_config(None, *words, *MODELS[model]), None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    dataset, batch = open_dataset(config.data, seed=1), config.train.global_batch_size
    stream = open_stream(
        dataset, config.data, seed=config.run.seed, seq_len=21, global_batch_size=batch, micro_batch_size=batch
    )
    block = stream.read_microbatch(0, 0)
    total = torch.zeros((), dtype=torch.float64)
    assert (block.document_ids.max(axis=1) > 0).sum() > batch // 2
    for inputs, targets, document_ids in zip(block.inputs, block.targets, block.document_ids, strict=True):
        for number in np.unique(document_ids):
            in_document = document_ids == number
            total += loss_sum(
                decoder(torch.tensor(inputs[in_document])[None]), torch.tensor(targets[in_document])[None]
            ).detach()
    assert metrics[0]["train/loss"] == pytest.approx(float(total) / block.valid_tokens, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "pp-2, gpipe, selective"),
        ("llama", "dp-3"),
        ("gpt2", "tp-2"),
        ("gpt2", "ring-2 x tp-2"),
        ("llama", "ulysses-2"),
        ("gpt2", "zero3-2 x pp-2, zbv"),
    ],
)
def test_packed_training_equals_one_process(
    pool: WarmPool, tmp_path: Path, words: list[str], model: str, layout: str
) -> None:
    settings = [*words, *MODELS[model], *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    expected, state = run_layout(pool, tmp_path / "alone", *settings, "cluster.workers=1", "eval.interval=1")
    steps, result_state = run_layout(pool, tmp_path / "layout", *settings, *LAYOUTS[layout], "eval.interval=1")
    for result, reference in zip(steps, expected, strict=True):
        assert result["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-12)
        assert result["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-11)
    validated = [[step["val/loss"] for step in metrics if "val/loss" in step] for metrics in (steps, expected)]
    assert len(validated[1]) == 2
    assert validated[0] == pytest.approx(validated[1], rel=1e-12)
    for name, tensor in state.items():
        assert (result_state[name] - tensor).double().norm() <= 1e-9 * tensor.double().norm(), name


@pytest.mark.parametrize("layout", ["dp-3", "zero3-2 x pp-2, zbv"])
def test_only_responses_count_in_the_loss(pool: WarmPool, tmp_path: Path, pairs: list[str], layout: str) -> None:
    """The loss is the mean over response tokens of the global batch, of which ranks have different numbers."""
    settings = [*pairs, *LLAMA, "model.dropout=0", *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    steps, _ = run_layout(pool, tmp_path, *settings, *LAYOUTS[layout])
    config = make_small_config(None, *settings, "cluster.workers=1")
    decoder = Decoder(prepare_run(config, None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    dataset, batch = open_dataset(config.data, seed=1), config.train.global_batch_size
    stream = open_stream(
        dataset, config.data, seed=config.run.seed, seq_len=21, global_batch_size=batch, micro_batch_size=batch
    )
    losses = []
    for inputs in stream.read_microbatch(0, 0).inputs:
        (document,) = [
            candidate for candidate in make_documents(7)["train"] if np.array_equal(candidate[:7], inputs[:7])
        ]
        tokens = torch.tensor(document[:22])[None]
        token_losses = torch.nn.functional.cross_entropy(decoder(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
        losses.append(token_losses[4:].detach())  # the first target of a response is its sixth token
    assert len({loss.numel() for loss in losses}) > 3
    assert steps[0]["train/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)


@pytest.mark.parametrize(
    ("balancing", "layout"),
    [
        ("loss", ["cluster.workers=1"]),
        ("loss", ["cluster.workers=2", "parallel.ep=2"]),
        ("loss", LAYOUTS["ring-2 x tp-2"]),
        ("bias", LAYOUTS["dp-3"]),
        ("bias", ["cluster.workers=2", "parallel.pp=2"]),
    ],
)
def test_padding_does_not_balance_experts(pool: WarmPool, tmp_path: Path, balancing: str, layout: list[str]) -> None:
    """The same documents in longer rows have the same gradients and biases."""
    documents = {name: [document[:20] for document in part] for name, part in make_documents(7).items()}
    write_dataset(tmp_path / "data", documents, vocab_size=64, shard_tokens=100, prompt=5)
    settings = [*EXPERTS, f"data.path={tmp_path / 'data'}", "data.packing=padded", "model.vocab_size=64"]
    settings += [f"model.load_balancing={balancing}", "model.load_balancing_weight=0.5", "model.expert_bias_rate=0.1"]
    expected, state = run_layout(pool, tmp_path / "short", *settings, "train.seq_len=19", "cluster.workers=1")
    steps, result_state = run_layout(pool, tmp_path / "long", *settings, "train.seq_len=31", *layout)
    for result, reference in zip(steps, expected, strict=True):
        assert result["train/loss"] == pytest.approx(reference["train/loss"], rel=1e-12)
        assert result["train/grad_norm"] == pytest.approx(reference["train/grad_norm"], rel=1e-11)
    for name, tensor in state.items():
        assert (result_state[name] - tensor).double().norm() <= 1e-9 * tensor.double().norm(), name
    assert balancing == "loss" or any(tensor.any() for name, tensor in state.items() if "router.bias" in name)
