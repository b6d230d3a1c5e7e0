"""Tokenizers on the way out and back, beside transformers' own reading of the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc import export_model, import_model
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, CharTokenizer, Tokenizer
from raytrain_hpc.data.tokenizer.bpe import train_tokenizer
from raytrain_hpc.data.tokenizer.hf_files import build_tokenizer_files
from raytrain_hpc.huggingface.atomic_dir import PASSTHROUGH_FILES
from tests.huggingface.random_models import build_random_model

transformers = pytest.importorskip("transformers")

TEXTS = ["def f(x):\n\treturn x  # ½ of it\r\n", "  two  spaces ", "naïve 東京 🙂", "\x00\x7f\x80"]


def load_with_transformers(directory: Path, files: dict[str, str]) -> Any:
    for name, text in files.items():
        (directory / name).write_text(text)
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "tokenizer",
    [ByteTokenizer(), CharTokenizer("".join(TEXTS)), train_tokenizer(TEXTS * 3, 300)],
    ids=lambda tokenizer: tokenizer.name,
)
def test_ids_are_the_same_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    theirs = load_with_transformers(tmp_path, build_tokenizer_files(tokenizer, 128))
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.end_of_text and theirs.model_max_length == 128


def test_a_model_takes_its_tokenizer_along(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS * 3, 67 + 256)
    own = load_with_transformers(tmp_path, build_tokenizer_files(tokenizer, 128))
    own.chat_template = "{{ messages[0]['content'] }}"
    model = build_random_model("llama")
    model.resize_token_embeddings(len(own))
    model.generation_config.pad_token_id = 5
    model.save_pretrained(tmp_path / "theirs")
    own.save_pretrained(tmp_path / "theirs")
    made = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert made.tokenizer_kind == "hf"
    assert export_model(tmp_path / "ours", tmp_path / "out").has_tokenizer
    for name in PASSTHROUGH_FILES:
        there, back = tmp_path / "theirs" / name, tmp_path / "out" / name
        assert there.exists() == back.exists() and (not there.exists() or there.read_bytes() == back.read_bytes()), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (model.config.eos_token_id, 5)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again.chat_template == own.chat_template and again(TEXTS[0])["input_ids"] == own(TEXTS[0])["input_ids"]
