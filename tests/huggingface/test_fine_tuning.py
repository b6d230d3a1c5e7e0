"""Fine-tuning an imported model on prompt and response pairs, compared with a plain loop of transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc import import_model, prepare
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.data.tokenizer.bpe import train_tokenizer
from raytrain_hpc.data.tokenizer.hf_files import build_tokenizer_files
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import CheckpointError, ConfigError, DataError
from tests.huggingface.random_models import build_random_model
from tests.warm_pool import get_step_metrics

transformers = pytest.importorskip("transformers")

STEPS, LENGTH, BATCH = 20, 24, 4
PAIRS = [
    {"question": f"What is {a} and {b}?", "answer": f" It is {a + b}" + ", of course" * (a % 4)}
    for a in range(8)
    for b in range(8)
]
OVERRIDES = [
    "data.packing=padded",
    f"train.steps={STEPS}",
    f"train.seq_len={LENGTH}",
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=1",
    "optimizer.lr=1e-3",
    "lr_scheduler.name=constant",
    "lr_scheduler.warmup_steps=0",
    "cluster.workers=2",
    "logging.tensorboard=false",
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a Hugging Face model ("theirs"), its import ("ours"), and tokenized pairs ("data")."""
    directory = tmp_path_factory.mktemp("tune")
    (directory / "theirs").mkdir()
    tokenizer = train_tokenizer([f"{pair['question']}{pair['answer']}" for pair in PAIRS], 320)
    for name, text in build_tokenizer_files(tokenizer, 128).items():
        (directory / "theirs" / name).write_text(text)
    model = build_random_model("llama, tied")
    model.resize_token_embeddings(tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.save_pretrained(directory / "theirs")
    import_model(directory / "theirs", directory / "ours")
    (directory / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    prepare(
        [str(directory / "pairs.jsonl")],
        str(directory / "data"),
        tokenizer=f"hf:{directory / 'ours' / 'huggingface'}",
        prompt_field="question",
        response_field="answer",
        val_fraction=0.0,
        engine="local",
    )
    return directory


def make_overrides(workspace: Path, run: Path, *more: str) -> list[str]:
    return [
        f"run.init_from={workspace / 'ours'}",
        f"run.dir={run}",
        f"data.path={workspace / 'data'}",
        *OVERRIDES,
        *more,
    ]


def train_reference_loop(workspace: Path, order: list[list[int]]) -> list[float]:
    """Return the losses of the same pairs in the same order with transformers' model, tokenizer and loss."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(workspace / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(workspace / "theirs", dtype=torch.float32).train()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    not_decayed = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": not_decayed, "weight_decay": 0.0}]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8), []
    for numbers in order:
        ids, labels = torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64), torch.full((BATCH, LENGTH + 1), -100)
        for row, number in enumerate(numbers):
            prompt = tokenizer(PAIRS[number]["question"])["input_ids"]
            response = [*tokenizer(PAIRS[number]["answer"])["input_ids"], tokenizer.eos_token_id]
            tokens = torch.tensor([*prompt, *response])[: LENGTH + 1]
            ids[row, : len(tokens)] = tokens
            labels[row, len(prompt) : len(tokens)] = tokens[len(prompt) :]
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_losses_match_a_plain_loop(workspace: Path, pool: Any, tmp_path: Path) -> None:
    config = load_config(None, make_overrides(workspace, tmp_path / "run"))
    stream = prepare_run(config, None, lambda line: None).stream
    order = [[int(stream.get_positions(step, v)[0]) for v in range(BATCH)] for step in range(STEPS)]
    assert len({number for numbers in order for number in numbers}) == len(PAIRS)  # more than one epoch
    losses = [step["train/loss"] for step in get_step_metrics(pool.train(config)[0])]
    reference = train_reference_loop(workspace, order)
    assert losses == pytest.approx(reference, abs=1e-5)
    assert sum(losses[-5:]) < sum(losses[:5]) - 1


def test_settings_and_data_that_contradict_the_import_are_refused(workspace: Path, tmp_path: Path) -> None:
    def refused(*more: str) -> Any:
        return prepare_run(
            load_config(None, make_overrides(workspace, tmp_path / "run", *more)), None, lambda line: None
        )

    with pytest.raises(ConfigError, match=r"model.norm_eps=0.001.*the model in .*ours has 1e-05; leave the key out"):
        refused("model.norm_eps=0.001")
    with pytest.raises(DataError, match="its tokenizer differs from that of the model"):
        refused("data.path=stdlib", "data.packing=stream")
    with pytest.raises(ConfigError, match=r"run.init_from=.*has no checkpoint; give a run directory"):
        refused(f"run.init_from={tmp_path}")
    assert refused("model.dropout=0.1").model_spec.dropout == 0.1  # dropout is not part of the architecture


def test_weights_of_another_dtype_are_refused(workspace: Path, pool: Any, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"run.init_from: .*float32"):
        pool.train(load_config(None, make_overrides(workspace, tmp_path / "run", "train.dtype=fp64")))


def test_corrupted_import_is_refused(workspace: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(workspace / "ours", tmp_path / "ours")
    (shard,) = (tmp_path / "ours").glob("checkpoints/*/rank-*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    overrides = [f"run.init_from={tmp_path / 'ours'}", f"run.dir={tmp_path / 'run'}", "data.path=synthetic"]
    with pytest.raises(CheckpointError, match="none of its checkpoints is valid"):
        prepare_run(load_config(None, overrides), None, lambda line: None)
