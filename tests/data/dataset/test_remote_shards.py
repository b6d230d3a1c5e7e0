"""Datasets in an object store, read by ranges or preloaded, from a server of its own process over HTTP."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest

from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset.local_cache import copy_to_local_cache
from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, load_manifest, verify_shards
from raytrain_hpc.data.dataset.sources import open_dataset
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.errors import DataError
from tests.data.position_tokens import VOCAB_SIZE, write_dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 1, 5000, shard_tokens=1500, masked=True)


@pytest.fixture(scope="module")
def bucket(dataset: Path) -> Iterator[str]:
    """The dataset's URI at a local object-store server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}
    before = {key: os.environ.get(key) for key in keys}
    os.environ.update(keys)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline, "the object store did not start"
                time.sleep(0.1)
        options = f"scheme=http&endpoint_override=127.0.0.1:{port}&region=us-east-1"
        store, _ = pyarrow.fs.FileSystem.from_uri(f"s3://bucket/?{options}&allow_bucket_creation=true")
        store.create_dir("bucket")
        pyarrow.fs.copy_files(str(dataset), "bucket/a", destination_filesystem=store)
        yield f"s3://bucket/a?{options}"
    finally:
        server.kill()
        server.wait()
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.mark.parametrize("packing", ["stream", "documents", "padded"])
def test_ranged_reads_give_the_bytes_of_the_disk(dataset: Path, bucket: str, packing: str) -> None:
    streams = []
    for path in (str(dataset), bucket):
        data = DataConfig(path=path, packing=packing)
        recipe = StreamSpec(data, VOCAB_SIZE, 3, 16, 8, 4)
        streams.append(recipe.open_stream(recipe.open_dataset()))
    for step in (0, 7, 10**6):
        here, there = (one.read_microbatch(step, 1) for one in streams)
        for part in ("inputs", "targets", "samples"):
            assert np.array_equal(getattr(here, part), getattr(there, part))
        assert (here.documents is None) == (there.documents is None)
        assert here.documents is None or np.array_equal(here.documents, there.documents)
    assert streams[0].get_state(5) == streams[1].get_state(5)


def test_validation_and_mixtures_with_local_sources(dataset: Path, bucket: str) -> None:
    both = open_dataset(DataConfig(sources=[SourceConfig(str(dataset), 1), SourceConfig(bucket, 1)]), seed=1)
    assert both.val is not None and both.val.num_tokens == 400
    starts = np.array([0, 195, 390])
    assert np.array_equal(both.val.read(starts, 10)[0], both.val.read(starts + [200, 0, 0], 10)[0])


def test_what_is_wrong_with_a_uri_is_said(bucket: str) -> None:
    with pytest.raises(DataError, match="not a dataset"):
        load_manifest(bucket.replace("/a?", "/nothing?"))
    with pytest.raises(DataError, match="not a place to read from"):
        load_manifest("s4://bucket/a")
    with pytest.raises(DataError, match="cannot be read") as told:
        load_manifest("s3://key:secret@bucket/a?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1")
    assert "secret" not in str(told.value)


def test_preload_from_an_object_store(bucket: str, dataset: Path, tmp_path: Path) -> None:
    data = DataConfig(path=bucket, preload=str(tmp_path))
    opened = StreamSpec(data, VOCAB_SIZE, 3, 16, 8, 4).open_dataset()
    copies = {path.name: path for path in tmp_path.glob("dataset-*/*.arrow")}
    assert {name: path.read_bytes() for name, path in copies.items()} == {
        path.name: path.read_bytes() for path in dataset.glob("*.arrow")
    }
    assert opened.dataset_hash == load_manifest(dataset).dataset_hash


def _preload(source: Path, into: Path) -> None:
    copy_to_local_cache(source, load_manifest(source), into)


def test_one_process_copies_and_the_others_find_it(dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_preload, args=(dataset, tmp_path)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    (copy,) = tmp_path.iterdir()
    verify_shards(copy, load_manifest(copy))
    assert not list(copy.glob("*.partial"))
    before = {path: path.stat().st_ino for path in copy.glob("*.arrow")}
    assert copy_to_local_cache(dataset, load_manifest(dataset), tmp_path) == copy
    assert {path: path.stat().st_ino for path in copy.glob("*.arrow")} == before


def test_a_copy_that_was_cut_is_made_again_and_a_changed_source_refused(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "source", 1, 5000)
    copy = copy_to_local_cache(source, load_manifest(source), tmp_path / "copies")
    shard = next(copy.glob("train*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    copy_to_local_cache(source, load_manifest(source), tmp_path / "copies")
    assert shard.read_bytes() == whole
    original = source / shard.name
    original.write_bytes(whole[:-50] + bytes(50))
    with pytest.raises(DataError, match="does not match its sha256"):
        copy_to_local_cache(source, load_manifest(source), tmp_path / "others")
    assert not list((tmp_path / "others").rglob("*.partial"))


def _on_a_small_disk(source: Path, into: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        _preload(source, into)
    except DataError as error:
        os._exit(7 if f"data.preload={into}: cannot be written" in str(error) else 8)


def test_no_space_is_one_clear_line(dataset: Path, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_on_a_small_disk, args=(dataset, tmp_path / "full"))
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("train*.arrow"))
    assert MANIFEST_FILE not in [path.name for path in tmp_path.rglob("*")]
