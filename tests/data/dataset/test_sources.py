import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset import local_cache
from raytrain_hpc.data.dataset.builtin import SyntheticTokens, get_cache_dir, prepare_stdlib_dataset
from raytrain_hpc.data.dataset.manifest import load_manifest
from raytrain_hpc.data.dataset.sources import describe_source, open_dataset
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.distributed.process_groups import GenerationAbortedError
from raytrain_hpc.errors import DataError
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.data_builder import open_data
from tests.warm_pool import make_small_config, make_worker_spec


@pytest.fixture
def prepared(tmp_path):
    def write(name, text, **settings):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, **settings)
        return tmp_path / name

    return write


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    return prepare_stdlib_dataset(tmp_path_factory.mktemp("cache"))


def test_open_dataset_directory(prepared):
    path = prepared("a", "hello world " * 20, tokenizer="char")
    dataset = open_dataset(DataConfig(path=str(path)), seed=1)
    assert dataset.vocab_size == 8
    assert dataset.tokenizer.decode(dataset.train[0].read(np.array([6]), 5)[0]) == "world"
    assert dataset.val.num_tokens == 24
    assert dataset.dataset_hash == load_manifest(path).dataset_hash
    assert dataset.mixture == ({"dataset_hash": dataset.dataset_hash, "weight": 1.0},)


def test_dataset_without_validation_split(prepared):
    assert open_dataset(DataConfig(path=str(prepared("a", "text", val_fraction=0))), seed=1).val is None


def test_mixture_of_datasets(prepared):
    paths = [prepared("a", "a" * 100), prepared("b", "b" * 50), prepared("c", "c" * 10, val_fraction=0)]
    sources = [SourceConfig(str(path), weight) for path, weight in zip(paths, (1, 2, 3), strict=True)]
    dataset = open_dataset(DataConfig(sources=sources), seed=1)
    assert [t.num_tokens for t in dataset.train] == [90, 45, 10]
    assert dataset.weights == (1, 2, 3)
    assert bytes(dataset.val.read(np.array([0]), 15)[0].tolist()) == b"a" * 10 + b"b" * 5
    swapped = open_dataset(DataConfig(sources=sources[::-1]), seed=1)
    assert len({dataset.dataset_hash, swapped.dataset_hash, load_manifest(paths[0]).dataset_hash}) == 3


def test_validation_of_a_mixture_with_and_without_loss_masks(prepared, tmp_path):
    """Tokens of the dataset without a mask all count, as they do in training."""
    rows = [{"prompt": "pp" * number, "response": "rrr"} for number in range(1, 21)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([tmp_path / "pairs.jsonl"], tmp_path / "pairs", prompt_field="prompt", response_field="response")
    paths = [prepared("a", "a" * 500, shard_tokens=20), tmp_path / "pairs", prepared("b", "b" * 100)]
    arrays = [open_dataset(DataConfig(path=str(path)), seed=1).val for path in paths]
    expected = np.concatenate([array.read_loss_mask(np.array([0]), array.num_tokens)[0] for array in arrays])
    sources = [SourceConfig(str(path), 1) for path in paths]
    val = pickle.loads(pickle.dumps(open_dataset(DataConfig(sources=sources), seed=1).val))
    assert val.masked and 0 < expected[:-10].sum() < expected.size - 10
    for length in (1, 9, expected.size):
        starts = np.arange(0, expected.size - length + 1)
        windows = np.stack([expected[start : start + length] for start in starts])
        assert np.array_equal(val.read_loss_mask(starts, length), windows)


def test_mixture_requires_a_common_tokenizer(prepared):
    sources = [SourceConfig(str(prepared(name, name * 100, tokenizer="char")), 1) for name in "ab"]
    with pytest.raises(DataError, match="different tokenizers"):
        open_dataset(DataConfig(sources=sources), seed=1)
    with pytest.raises(DataError, match="use them alone"):
        open_dataset(DataConfig(sources=[sources[0], SourceConfig("synthetic", 1)]), seed=1)


def test_opening_verifies_checksums(prepared):
    path = prepared("a", "a" * 5000)
    raw = bytearray((path / "train-00000.arrow").read_bytes())
    raw[3000] ^= 4
    (path / "train-00000.arrow").write_bytes(raw)
    with pytest.raises(DataError, match="does not match its sha256"):
        open_dataset(DataConfig(path=str(path)), seed=1)
    open_dataset(DataConfig(path=str(path)), seed=1, verify_limit_bytes=0)
    with pytest.raises(DataError, match="no such directory"):
        open_dataset(DataConfig(path=str(path / "nowhere")), seed=1)


def test_synthetic_tokens_are_a_uniform_function_of_position():
    tokens = SyntheticTokens(100, seed=3)
    far = tokens.num_tokens - 50_000
    read = tokens.read(np.array([0, far]), 50_000)
    assert np.array_equal(read[1, 700:900], SyntheticTokens(100, seed=3).read(np.array([far + 700]), 200)[0])
    counts = np.bincount(read.ravel(), minlength=100)
    assert counts.size == 100
    assert abs(((counts - 1000) ** 2 / 1000).mean() - 1) < 0.5
    assert abs(np.corrcoef(read[0, 1:], read[0, :-1])[0, 1]) < 0.02
    assert (tokens.read(np.array([0]), 100) != SyntheticTokens(100, seed=4).read(np.array([0]), 100)).mean() > 0.9
    for start in (-1, tokens.num_tokens - 4):
        with pytest.raises(DataError, match="exceeds the"):
            tokens.read(np.array([start]), 5)


def test_synthetic_dataset():
    dataset = open_dataset(DataConfig(path="synthetic"), seed=1, vocab_size=1000)
    assert (dataset.vocab_size, dataset.tokenizer, len(dataset.train)) == (1000, None, 1)
    assert open_dataset(DataConfig(path="synthetic"), seed=1).vocab_size == 256
    assert open_dataset(DataConfig(path="synthetic"), seed=2, vocab_size=1000).dataset_hash != dataset.dataset_hash
    assert dataset.val.num_tokens < 1 << 20


def test_stdlib_dataset_is_source_text_without_tests(stdlib):
    manifest = load_manifest(stdlib)
    names = [item.name for item in manifest.inputs]
    assert {"argparse.py", "dataclasses.py"} <= set(names)
    assert names != sorted(names)
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").stat().st_size in [i.bytes for i in manifest.inputs if i.name == "argparse.py"]
    assert not any(name.startswith("test_") for name in names)
    total = sum(split.tokens for split in manifest.splits.values())
    assert manifest.splits["val"].tokens == total - total * 9 // 10
    assert sum(item.bytes for item in manifest.inputs) == total > 5_000_000


def test_stdlib_dataset_is_prepared_once(stdlib):
    before = (stdlib / "manifest.json").stat().st_mtime_ns
    assert prepare_stdlib_dataset(stdlib.parent) == stdlib
    assert (stdlib / "manifest.json").stat().st_mtime_ns == before


def test_concurrent_processes_prepare_the_stdlib_dataset_once(tmp_path):
    program = "from raytrain_hpc.data.dataset.builtin import prepare_stdlib_dataset; print(prepare_stdlib_dataset())"
    environment = {**os.environ, "RAYTRAIN_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [str(path) for path in tmp_path.iterdir()] == list(printed)


def test_location_of_the_default_cache(monkeypatch):
    monkeypatch.delenv("RAYTRAIN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert get_cache_dir() == Path("/x/raytrain_hpc")
    monkeypatch.setenv("RAYTRAIN_CACHE", "/y")
    assert get_cache_dir() == Path("/y")
    monkeypatch.delenv("RAYTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert get_cache_dir() == Path("/home/someone/.cache/raytrain_hpc")


def test_built_in_datasets_are_described(stdlib: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(stdlib.parent))
    manifest = load_manifest(stdlib)
    text = describe_source("stdlib")
    assert text == describe_source(str(stdlib)) and f"{manifest.splits['train'].tokens:,} train" in text
    synthetic = describe_source("synthetic")
    assert open_dataset(DataConfig(path="synthetic"), seed=1337).dataset_hash in synthetic and "random" in synthetic


def test_workers_refuse_another_dataset_than_the_run_was_started_with(prepared, tmp_path):
    config = load_config("quickstart", [f"data.path={prepared('a', 'a' * 200)}", f"run.dir={tmp_path / 'run'}"])
    config.train.seq_len = 16
    spec = make_worker_spec(config, 1, steps_to=1)
    started_with = open_data(spec).dataset_hash
    other = load_manifest(prepared("b", "b" * 200)).dataset_hash
    (tmp_path / "a").rename(tmp_path / "old")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(DataError) as error:
        open_data(spec)
    expected = [f"data.path={tmp_path / 'a'}: ", socket.gethostname(), started_with, other]
    assert all(text in str(error.value) for text in expected)


def test_a_rank_reports_outages_and_copies(prepared, tmp_path, monkeypatch):
    overrides = [
        f"data.path={prepared('a', 'a' * 2000)}",
        f"data.local_cache={tmp_path / 'cache'}",
        "data.engine=local",
    ]
    config = make_small_config(tmp_path / "run", *overrides, "model.vocab_size=auto")
    monkeypatch.setattr(local_cache, "_BLOCK_BYTES", 1000)
    memory_map, failures, phases = pa.memory_map, [2], []

    def fail_twice(path):
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.EIO, "Input/output error")
        return memory_map(path)

    control = ControlChannel()
    monkeypatch.setattr(control, "set_phase", phases.append)
    spec = make_worker_spec(config, 1, steps_to=3)
    trainer = build_trainer(spec, 0, torch.device("cpu"), None, control)
    assert phases.count("loading") >= 4 and phases[-1] == "idle", "each block of the copy is progress"
    monkeypatch.setattr(pa, "memory_map", fail_twice)
    trainer.run(0, 3)
    notes = [record["text"] for record in control.drain() if record["type"] == "note"]
    for text in ("copying the dataset to data.local_cache", "cannot be read on node", "is read again, after"):
        assert sum(text in note for note in notes) == 1, notes


def test_a_copy_ends_when_its_generation_is_aborted(prepared, tmp_path, monkeypatch):
    """Otherwise the error of another rank would be reported, or the run continue, only when it is complete."""
    cache = tmp_path / "cache"
    overrides = [f"data.path={prepared('a', 'a' * 9000)}", f"data.local_cache={cache}", "model.vocab_size=auto"]
    spec = make_worker_spec(make_small_config(tmp_path / "run", *overrides), 1, steps_to=3)
    monkeypatch.setattr(local_cache, "_BLOCK_BYTES", 1000)
    control, phases = ControlChannel(), []

    def set_phase(phase):
        phases.append(phase)
        if phases.count("loading") == 3:
            control.abort()

    monkeypatch.setattr(control, "set_phase", set_phase)
    with pytest.raises(GenerationAbortedError):
        build_trainer(spec, 0, torch.device("cpu"), None, control)
    assert phases.count("loading") == 3 and not [*cache.rglob("*.partial")] and not [*cache.rglob("*.arrow")]


def test_description_of_a_dataset_in_an_object_store_is_refused():
    with pytest.raises(DataError, match=r"^s3://bucket/dataset: inspect needs a local path"):
        describe_source("s3://key:secret@bucket/dataset?region=eu-west-1")
