"""Results of `prepare` for every input format, and its errors for invalid input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raytrain_hpc.data.preprocess.partition as partition_module
import raytrain_hpc.data.preprocess.readers as readers_module
from raytrain_hpc.data.dataset.inspect import describe, format_prepare_summary
from raytrain_hpc.data.preprocess.input_files import InputFile
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.data.tokenizer.base import ByteTokenizer, parse_tokenizer_spec
from raytrain_hpc.data.tokenizer.registry import load_tokenizer, tokenizer_from_json
from raytrain_hpc.errors import DataError
from tests.data.preprocess.input_corpus import (
    make_document,
    read_contents,
    tokenize_documents,
    write_mixed,
    write_pairs,
    write_rank_file,
)


@pytest.mark.parametrize("tokenizer", ["byte", "char", "tiktoken:ranks", "bpe:300"])
def test_mixed_folder_gives_the_tokens_of_whole_documents(tmp_path, monkeypatch, tokenizer):
    """Partition, block and span sizes change neither tokens nor document ends."""
    documents = write_mixed(tmp_path / "in")
    write_rank_file(tmp_path / "ranks")
    spec = tokenizer.replace("ranks", str(tmp_path / "ranks"))
    manifest = prepare([tmp_path / "in"], tmp_path / "whole", tokenizer=spec, val_fraction=0)
    expected = tokenize_documents(documents, tokenizer_from_json(manifest.tokenizer))
    assert read_contents(tmp_path / "whole")[:2] == expected
    assert format_prepare_summary(manifest)[1] == "1 empty document skipped"
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 1000)
    monkeypatch.setattr(partition_module, "BLOCK_BYTES", 17)
    monkeypatch.setattr(readers_module, "SPAN_CHARS", 90)
    if tokenizer != "bpe:300":  # it would be trained on another sample
        split_manifest = prepare([tmp_path / "in"], tmp_path / "cut", tokenizer=spec, val_fraction=0, shard_tokens=500)
        assert read_contents(tmp_path / "cut")[:2] == expected  # some documents are longer than a shard
        assert [item.name for item in split_manifest.inputs] == sorted(item.name for item in manifest.inputs)


def test_hugging_face_tokenizer_gives_the_tokens_of_whole_documents(tmp_path, monkeypatch):
    documents = write_mixed(tmp_path / "in")
    trained = prepare([tmp_path / "in"], tmp_path / "trained", tokenizer="bpe:300").tokenizer
    (tmp_path / "tokenizer.json").write_text(trained["tokenizer"])
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 1000)
    monkeypatch.setattr(readers_module, "SPAN_CHARS", 90)
    manifest = prepare([tmp_path / "in"], tmp_path / "out", tokenizer=f"hf:{tmp_path}", val_fraction=0)
    tokenizer = load_tokenizer(parse_tokenizer_spec(f"hf:{tmp_path}/tokenizer.json"))
    assert read_contents(tmp_path / "out")[:2] == tokenize_documents(documents, tokenizer)
    assert str(tmp_path) not in json.dumps(manifest.to_json())
    described = describe(tmp_path / "out")
    assert "61 in train" in described and "token 0 after every document" in described
    assert max(map(len, described.splitlines())) < 400  # the content of the tokenizer is not printed


def test_only_responses_of_pairs_count_as_targets(tmp_path, monkeypatch):
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    tokenizer = load_tokenizer(parse_tokenizer_spec(f"tiktoken:{write_rank_file(tmp_path / 'ranks')}"))
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 700)
    manifest = prepare(
        [tmp_path / "pairs.jsonl"],
        tmp_path / "out",
        tokenizer=f"tiktoken:{tmp_path / 'ranks'}",
        prompt_field="prompt",
        response_field="response",
        shard_tokens=300,
    )
    tokens, mask, ends = [], [], []
    for prompt, response in pairs:
        if response:
            prompt_ids, response_ids = tokenizer.encode(prompt).tolist(), tokenizer.encode(response).tolist()
            tokens += [*prompt_ids, *response_ids, tokenizer.end_of_text]
            mask += [0] * len(prompt_ids) + [1] * (len(response_ids) + 1)
            ends.append(len(tokens))
    stored = read_contents(tmp_path / "out")
    assert (stored[0], stored[2]) == (tokens, mask)
    cut = manifest.splits["train"].tokens  # the only end that is not the end of a document
    assert sorted({*ends, cut}) == stored[1]
    assert manifest.masked and manifest.empty_documents == 1
    assert f"on {sum(mask):,} of {len(mask):,} tokens" in describe(tmp_path / "out")


def test_patterns_and_fields(tmp_path):
    for name, text in [("b.jsonl", "two"), ("a.jsonl", "one"), ("c.ndjson", "three")]:
        (tmp_path / name).write_text(json.dumps({"body": text}) + "\n\n")
    prepare([f"{tmp_path}/*.jsonl"], tmp_path / "out", field="body", val_fraction=0)
    assert read_contents(tmp_path / "out")[:2] == tokenize_documents(["one", "two"], ByteTokenizer())
    with pytest.raises(DataError, match="no file matches the pattern"):
        prepare([f"{tmp_path}/*.csv"], tmp_path / "other")


def test_output_inside_the_input_folder_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    first = prepare([tmp_path], tmp_path / "out", val_fraction=0)
    assert prepare([tmp_path], tmp_path / "out", val_fraction=0) == first
    assert [item.name for item in first.inputs] == ["a.txt"]


def to_jsonl(*rows: object) -> bytes:
    return "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows).encode()


GOOD = {"text": "good"}
GZIPPED_TEXT = gzip.compress(make_document(1, 4000).encode())


def compress_zstd(raw: bytes) -> bytes:
    return pa.compress(raw, codec="zstd", asbytes=True)


def make_parquet(**columns: object) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


INVALID_INPUTS = {
    "field missing": ("a.jsonl", to_jsonl(GOOD, {"body": "x"}), {}, ["a.jsonl: line 2", "no field 'text'", "'body'"]),
    "field no text": ("a.jsonl", to_jsonl(GOOD, GOOD, {"text": 3}), {}, ["line 3 has a number in field 'text'"]),
    "not JSON": ("a.jsonl", to_jsonl(GOOD, "{nope}\n"), {}, ["line 2 is not JSON", "one object per line"]),
    "not an object": ("a.json", to_jsonl([1, 2]), {}, ["line 1 is a list and not an object"]),
    "not UTF-8 in a line": ("a.jsonl", b'{"text": "\xff"}\n', {}, ["line 1 is not UTF-8"]),
    "half a pair of surrogates": ("a.jsonl", b'{"text": "\\ud800"}\n', {}, ["line 1 has half of a surrogate pair"]),
    "column missing": ("a.parquet", make_parquet(body=["x"]), {}, ["a.parquet: has no column 'text'; it has body"]),
    "column no text": ("a.parquet", make_parquet(text=[1]), {}, ["column 'text' is int64 and not text"]),
    "no Parquet": ("a.parquet", b"PAR1 nonsense", {}, ["a.parquet: not a readable Parquet file"]),
    "packed Parquet": ("a.parquet.gz", GZIPPED_TEXT, {}, ["decompress the file first"]),
    "truncated gzip": ("a.txt.gz", GZIPPED_TEXT[:-9], {}, ["a.txt.gz: cannot be decompressed", "Truncated"]),
    "truncated zstd": (
        "a.jsonl.zst",
        compress_zstd(to_jsonl(GOOD) * 99)[:-3],
        {},
        ["a.jsonl.zst: cannot be decompressed"],
    ),
    "no gzip": ("a.txt.gz", b"text after all", {}, ["a.txt.gz: cannot be decompressed"]),
    "not UTF-8 inside": (
        "a.txt.gz",
        gzip.compress(b"abc\xff"),
        {"tokenizer": "char"},
        ["byte 3 of the decompressed text is not UTF-8"],
    ),
    "binary file": (
        "a.txt",
        b"\x7fELF\x02\x01\x01\0\0",
        {},
        ["a.txt: byte 7 is NUL, so it is a binary file", "leave it out"],
    ),
    "UTF-16": ("a.txt", "text".encode("utf-16"), {"tokenizer": "char"}, ["byte 3 is NUL", "convert it to UTF-8"]),
    "packed binary file": ("a.gz", gzip.compress(b"\x89PNG\r\n\x1a\n\0\0"), {}, ["a.gz: byte 8 is NUL"]),
    "binary file with rows": ("a.jsonl", b"\x7fELF\0", {}, ["line 1 is not JSON"]),
    "pairs in text": ("a.txt", b"x", {"prompt_field": "p", "response_field": "r"}, ["a.txt: text has no fields"]),
    "half a pair": ("a.jsonl", to_jsonl(GOOD), {"prompt_field": "p"}, ["belong together"]),
    "field and pair": (
        "a.jsonl",
        to_jsonl(GOOD),
        {"field": "text", "prompt_field": "p", "response_field": "r"},
        ["leave field out"],
    ),
    "field in text": ("a.txt", b"x", {"field": "body"}, ["field=body", "none of the inputs has fields"]),
    "no text at all": ("a.jsonl", to_jsonl({"text": ""}, {"text": None}), {}, ["of 0 tokens"]),
    "tokenizer missing": ("a.txt", b"x", {"tokenizer": "hf:nowhere"}, ["tokenizer=hf:nowhere", "No such file"]),
    "tokenizer no file": ("a.txt", b"x", {"tokenizer": "tiktoken:{dir}/a.txt"}, ["line 1 of the rank file"]),
    "tokenizer no JSON": ("a.txt", b"x", {"tokenizer": "hf:{dir}/a.txt"}, ["not a tokenizer.json"]),
    "vocabulary too small": ("a.txt", b"x", {"tokenizer": "bpe:200"}, ["bpe:200", "at least 257"]),
    "engine": ("a.txt", b"x", {"engine": "spark"}, ["engine='spark'", "auto, local, ray"]),
}


@pytest.mark.parametrize("case", INVALID_INPUTS)
def test_invalid_input_is_reported_in_one_line_and_leaves_no_files(tmp_path: Path, case: str) -> None:
    name, content, settings, fragments = INVALID_INPUTS[case]
    (tmp_path / name).write_bytes(content)
    options = {k: v.replace("{dir}", str(tmp_path)) for k, v in settings.items()}
    with pytest.raises(DataError) as error:
        prepare([tmp_path / name], tmp_path / "out", **options)
    for part in fragments:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_error_names_the_line_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 100)
    (tmp_path / "a.jsonl").write_bytes(to_jsonl(*[{"text": "x" * 40}] * 50, {"txt": ""}, GOOD))
    with pytest.raises(DataError, match="line 51 has no field"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out")


@pytest.mark.parametrize(("package", "spec"), [("tokenizers", "bpe:300"), ("tiktoken", "tiktoken:{ranks}")])
def test_missing_package_is_named(tmp_path, monkeypatch, package, spec):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / "a.txt").write_text("text")
    spec = spec.replace("{ranks}", str(write_rank_file(tmp_path / "ranks")))
    with pytest.raises(DataError, match=f"pip install {package}"):
        prepare([tmp_path / "a.txt"], tmp_path / "out", tokenizer=spec)


def test_small_files_are_planned_in_linear_time(monkeypatch):
    """Count the sizes that are read: each range is added once to the partition that is open."""
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 250)
    reads = []
    nbytes = partition_module.FileRange.nbytes.fget
    monkeypatch.setattr(partition_module.FileRange, "nbytes", property(lambda part: reads.append(part) or nbytes(part)))
    files = [InputFile(Path(str(number)), str(number), 2, 0, "text", "") for number in range(1000)]
    partitions = partition_module.plan_partitions(files)
    assert len(reads) <= 3 * len(files)
    sizes = [sum(part.file.nbytes for part in partition.ranges) for partition in partitions]
    assert sizes == [250] * 8 and [part.file for p in partitions for part in p.ranges] == files
