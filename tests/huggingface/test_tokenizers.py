"""Export and import of tokenizers, compared with transformers reading the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc import export_model, import_dcp, import_model
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, CharTokenizer, Tokenizer
from raytrain_hpc.data.tokenizer.bpe import train_tokenizer
from raytrain_hpc.data.tokenizer.hf_files import build_tokenizer_files
from raytrain_hpc.huggingface.atomic_dir import PASSTHROUGH_FILES
from raytrain_hpc.storage.object_path import ObjectPath
from tests.dcp.llama_reference import SEQ_LEN, WORDS, build_llama, save_alone
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
def test_token_ids_match_transformers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    hf_tokenizer = load_with_transformers(tmp_path, build_tokenizer_files(tokenizer, 128))
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert hf_tokenizer(text, add_special_tokens=False)["input_ids"] == ids
        assert hf_tokenizer.decode(ids) == text
    assert hf_tokenizer.eos_token_id == tokenizer.end_of_text and hf_tokenizer.model_max_length == 128


def test_tokenizer_files_survive_import_and_export(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS * 3, 67 + 256)
    original = load_with_transformers(tmp_path, build_tokenizer_files(tokenizer, 128))
    original.chat_template = "{{ messages[0]['content'] }}"
    model = build_random_model("llama")
    model.resize_token_embeddings(len(original))
    model.generation_config.pad_token_id = 5
    model.save_pretrained(tmp_path / "theirs")
    original.save_pretrained(tmp_path / "theirs")
    result = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert result.tokenizer_kind == "hf"
    assert export_model(tmp_path / "ours", tmp_path / "out").has_tokenizer
    for name in PASSTHROUGH_FILES:
        source, exported = tmp_path / "theirs" / name, tmp_path / "out" / name
        assert source.exists() == exported.exists() and (
            not source.exists() or source.read_bytes() == exported.read_bytes()
        ), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (model.config.eos_token_id, 5)
    reloaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        reloaded.chat_template == original.chat_template
        and reloaded(TEXTS[0])["input_ids"] == original(TEXTS[0])["input_ids"]
    )


def test_tokenizer_files_survive_import_of_a_distributed_checkpoint(folder: ObjectPath, tmp_path: Path) -> None:
    """Also those of a run that was started from such an import in a bucket."""
    saved = save_alone(tmp_path / "dcp", build_llama().state_dict())
    files = build_tokenizer_files(train_tokenizer(TEXTS * 3, 258), SEQ_LEN)
    files |= {"chat_template.jinja": "{{ messages }}", "special_tokens_map.json": '{"bos_token": "<|begin|>"}'}
    files["tokenizer_config.json"] = json.dumps(json.loads(files["tokenizer_config.json"]) | {"bos_token": "<|begin|>"})
    (tmp_path / "theirs").mkdir()
    for name, text in files.items():
        (tmp_path / "theirs" / name).write_text(text)
    run = tmp_path / "ours"
    import_dcp(saved, run, WORDS, tokenizer=f"hf:{tmp_path / 'theirs'}")
    export_model(run, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    for path in (run / "huggingface").iterdir():
        (folder / "huggingface" / path.name).write_bytes(path.read_bytes())
    shutil.rmtree(run / "huggingface")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("init_from: ''", f"init_from: {folder}"))
    export_model(run, tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_text() for name in files} == files
