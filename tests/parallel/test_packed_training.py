"""Documents that share rows, or have one each, are trained as if each came alone, on every layout."""

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
        "parallel.schedule=zbv",
        "parallel.zero=3",
        "model.num_layers=5",
    ],
}


COMMON = ["train.seq_len=21", "model.vocab_size=64"]


def documents(shortest: int) -> dict[str, list[np.ndarray]]:
    """Of both splits: several in most rows, and some across rows."""
    generator = np.random.default_rng(5)
    return {
        name: [generator.integers(0, 64, size) for size in generator.integers(shortest, 30, number)]
        for name, number in (("train", 60), ("val", 9))
    }


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("documents")
    write_dataset(directory, documents(1), vocab_size=64, shard_tokens=100)
    return [f"data.path={directory}", "data.packing=documents", *COMMON]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prompts of five tokens, of which none counts, before responses of different lengths, one pair a row."""
    directory = tmp_path_factory.mktemp("pairs")
    write_dataset(directory, documents(7), vocab_size=64, shard_tokens=100, prompt=5)
    return [f"data.path={directory}", "data.packing=padded", *COMMON]


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_that_of_documents_one_by_one(pool: WarmPool, tmp_path: Path, words: list[str], model: str) -> None:
    config = make_small_config(
        tmp_path, *words, *MODELS[model], "train.dtype=fp64", "train.steps=2", "cluster.workers=1"
    )
    made = get_step_metrics(pool.train(config)[0])
    decoder = Decoder(prepare_run(make_small_config(None, *words, *MODELS[model]), None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    dataset, batch = open_dataset(config.data, seed=1), config.train.global_batch
    stream = open_stream(dataset, config.data, seed=config.run.seed, seq_len=21, global_batch=batch, micro_batch=batch)
    whole = stream.read_microbatch(0, 0)
    total = torch.zeros((), dtype=torch.float64)
    assert (whole.document_ids.max(axis=1) > 0).sum() > batch // 2
    for inputs, targets, documents in zip(whole.inputs, whole.targets, whole.document_ids, strict=True):
        for number in np.unique(documents):
            here = documents == number
            total += loss_sum(decoder(torch.tensor(inputs[here])[None]), torch.tensor(targets[here])[None]).detach()
    assert made[0]["train/loss"] == pytest.approx(float(total) / whole.valid_tokens, rel=1e-12)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", "dp-3"),
        ("gpt2", "tp-2"),
        ("gpt2", "ring-2 x tp-2"),
        ("llama", "ulysses-2"),
        ("gpt2", "zero3-2 x pp-2, zbv"),
    ],
)
def test_all_numbers_are_those_of_one_process(
    pool: WarmPool, tmp_path: Path, words: list[str], model: str, layout: str
) -> None:
    chosen = [*words, *MODELS[model], *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    expected, state = run_layout(pool, tmp_path / "alone", *chosen, "cluster.workers=1", "train.eval_every=1")
    steps, mine = run_layout(pool, tmp_path / "layout", *chosen, *LAYOUTS[layout], "train.eval_every=1")
    for here, there in zip(steps, expected, strict=True):
        assert here["train/loss"] == pytest.approx(there["train/loss"], rel=1e-12)
        assert here["train/grad_norm"] == pytest.approx(there["train/grad_norm"], rel=1e-11)
    validated = [[step["val/loss"] for step in made if "val/loss" in step] for made in (steps, expected)]
    assert len(validated[1]) == 2
    assert validated[0] == pytest.approx(validated[1], rel=1e-12)
    for name, tensor in state.items():
        assert (mine[name] - tensor).norm() <= 1e-9 * tensor.norm(), name


@pytest.mark.parametrize("layout", ["dp-3", "zero3-2 x pp-2, zbv"])
def test_responses_alone_count_whatever_the_split(
    pool: WarmPool, tmp_path: Path, pairs: list[str], layout: str
) -> None:
    """The loss is the mean over the responses' tokens of the global batch, of which ranks have different numbers."""
    chosen = [*pairs, *LLAMA, "model.dropout=0", *(word for word in LAYOUTS[layout] if word.startswith("model."))]
    steps, _ = run_layout(pool, tmp_path, *chosen, *LAYOUTS[layout])
    config = make_small_config(None, *chosen, "cluster.workers=1")
    decoder = Decoder(prepare_run(config, None, print).model_spec).double()
    init_weights(decoder, config.run.seed)
    dataset, batch = open_dataset(config.data, seed=1), config.train.global_batch
    stream = open_stream(dataset, config.data, seed=config.run.seed, seq_len=21, global_batch=batch, micro_batch=batch)
    losses = []
    for inputs in stream.read_microbatch(0, 0).inputs:
        (document,) = [one for one in documents(7)["train"] if np.array_equal(one[:7], inputs[:7])]
        tokens = torch.tensor(document[:22])[None]
        each = torch.nn.functional.cross_entropy(decoder(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
        losses.append(each[4:].detach())  # the first target of a response is its sixth token
    assert len({loss.numel() for loss in losses}) > 3
    assert steps[0]["train/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-12)
