"""Datasets in an object store, read by range requests or from the local cache; served over HTTP by another process."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.fs
import pytest
from werkzeug.wrappers import Response

from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset import local_cache
from raytrain_hpc.data.dataset.local_cache import copy_to_local_cache
from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, load_manifest, verify_shards
from raytrain_hpc.data.dataset.sources import open_dataset
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import ReadRetry
from raytrain_hpc.training.data_builder import open_data
from tests.data.position_tokens import VOCAB_SIZE, write_dataset
from tests.storage.bucket import BUCKET
from tests.storage.s3_server import Request, S3Server, make_slow_down_response
from tests.warm_pool import make_small_config, make_worker_spec


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "a", 1, 5000, shard_tokens=1500, masked=True)


@pytest.fixture(scope="module")
def bucket(dataset: Path) -> Iterator[str]:
    """URI of the dataset on a local object-store server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
def test_range_requests_give_the_same_batches_as_local_files(dataset: Path, bucket: str, packing: str) -> None:
    streams = []
    for path in (str(dataset), bucket):
        data = DataConfig(path=path, packing=packing)
        spec = StreamSpec(data, VOCAB_SIZE, 3, 16, 8, 4)
        streams.append(spec.open_stream(spec.open_dataset()))
    for step in (0, 7, 10**6):
        local, remote = (stream.read_microbatch(step, 1) for stream in streams)
        for name in ("inputs", "targets", "samples"):
            assert np.array_equal(getattr(local, name), getattr(remote, name))
        assert (local.document_ids is None) == (remote.document_ids is None)
        assert local.document_ids is None or np.array_equal(local.document_ids, remote.document_ids)
    assert streams[0].get_state(5) == streams[1].get_state(5)


@pytest.fixture
def server(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A store that can refuse requests, with the dataset."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    server = S3Server()
    for name in (MANIFEST_FILE, *(path.name for path in dataset.glob("*.arrow"))):
        server.write(f"a/{name}", (dataset / name).read_bytes())
    server.requests.clear()
    yield server
    server.close()


def get_uri(server: S3Server) -> str:
    options = f"scheme=http&endpoint_override={server.url.removeprefix('http://')}&region=us-east-1"
    return f"s3://{BUCKET}/a?{options}"


def test_reads_are_repeated_while_a_store_refuses_requests(dataset: Path, server: S3Server) -> None:
    lines, num_refused = list[str](), [0]

    def refuse(request: Request, forward: Callable[[], Response]) -> Response:
        if request.method != "GET" or num_refused[0] == 4:  # pyarrow repeats other requests itself, for 6 s
            return forward()
        num_refused[0] += 1
        return make_slow_down_response()

    specs = [
        StreamSpec(DataConfig(path=path, packing="documents"), VOCAB_SIZE, 3, 16, 8, 4)
        for path in (get_uri(server), str(dataset))
    ]
    with server.intercepting(refuse):
        streams = [spec.open_stream(spec.open_dataset(ReadRetry(30.0, lines.append))) for spec in specs]
        num_refused[0] = 0
        remote, local = (stream.read_microbatch(0, 1).inputs for stream in streams)
    assert np.array_equal(remote, local)
    assert ".arrow cannot be read" in lines[0] and ".arrow is read again" in lines[1]


def test_a_recovery_from_memory_looks_for_no_shard(server: S3Server) -> None:
    config = make_small_config(None, f"data.path={get_uri(server)}", "model.vocab_size=auto")
    spec = make_worker_spec(config, 1, steps_to=1)
    names = []
    for memory_step in (None, 3):
        server.requests.clear()
        open_data(replace(spec, memory_step=memory_step))
        names.append({request.path.rpartition("/")[2] for request in server.requests})
    assert names[1] == {MANIFEST_FILE} and len(names[0]) == 1 + 4 + 1  # with shards of both splits


def test_a_copy_continues_after_reads_that_failed(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_cache, "_BLOCK_BYTES", 1000)
    blocks: list[int] = []
    read = local_cache._BlockReader._read_next

    def fail_sometimes(self: local_cache._BlockReader) -> bytes:
        if self._offset == 2000 and len(blocks) % 2:
            blocks.append(-1)
            self._handle = None
            raise OSError(errno.ESTALE, "Stale file handle")
        return read(self)

    monkeypatch.setattr(local_cache._BlockReader, "_read_next", fail_sometimes)
    manifest = load_manifest(dataset)
    copy = copy_to_local_cache(dataset, manifest, tmp_path, ReadRetry(30.0), lambda: blocks.append(1))
    verify_shards(copy, manifest)
    sizes = [shard.bytes for split in manifest.splits.values() for shard in split.shards]
    assert blocks.count(1) == sum(-(-size // 1000) + 1 for size in sizes) and -1 in blocks


def test_remote_and_local_sources_can_be_mixed(dataset: Path, bucket: str) -> None:
    mixture = open_dataset(DataConfig(sources=[SourceConfig(str(dataset), 1), SourceConfig(bucket, 1)]), seed=1)
    assert mixture.val is not None and mixture.val.num_tokens == 400
    starts = np.array([0, 195, 390])
    assert np.array_equal(mixture.val.read(starts, 10)[0], mixture.val.read(starts + [200, 0, 0], 10)[0])


def test_invalid_uri_is_reported_without_credentials(bucket: str) -> None:
    with pytest.raises(DataError, match="not a dataset"):
        load_manifest(bucket.replace("/a?", "/nothing?"))
    with pytest.raises(DataError, match="not a readable location"):
        load_manifest("s4://bucket/a")
    with pytest.raises(DataError, match="cannot be read") as error:
        load_manifest("s3://key:secret@bucket/a?scheme=http&endpoint_override=127.0.0.1:9&region=us-east-1")
    assert "secret" not in str(error.value)


def test_remote_dataset_is_copied_to_the_local_cache(bucket: str, dataset: Path, tmp_path: Path) -> None:
    data = DataConfig(path=bucket, local_cache=str(tmp_path))
    opened = StreamSpec(data, VOCAB_SIZE, 3, 16, 8, 4).open_dataset()
    copies = {path.name: path for path in tmp_path.glob("dataset-*/*.arrow")}
    assert {name: path.read_bytes() for name, path in copies.items()} == {
        path.name: path.read_bytes() for path in dataset.glob("*.arrow")
    }
    assert opened.dataset_hash == load_manifest(dataset).dataset_hash


def _copy_dataset(source: Path, into: Path) -> None:
    copy_to_local_cache(source, load_manifest(source), into)


def test_concurrent_processes_copy_a_dataset_once(dataset: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_copy_dataset, args=(dataset, tmp_path)) for _ in range(4)]
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


def test_truncated_copy_is_replaced_and_changed_source_rejected(tmp_path: Path) -> None:
    source = write_dataset(tmp_path / "source", 1, 5000)
    copy = copy_to_local_cache(source, load_manifest(source), tmp_path / "copies")
    shard = next(copy.glob("train*.arrow"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-5])
    copy_to_local_cache(source, load_manifest(source), tmp_path / "copies")
    assert shard.read_bytes() == content
    original = source / shard.name
    original.write_bytes(content[:-50] + bytes(50))
    with pytest.raises(DataError, match="does not match its sha256"):
        copy_to_local_cache(source, load_manifest(source), tmp_path / "others")
    assert not list((tmp_path / "others").rglob("*.partial"))


def _copy_with_file_size_limit(source: Path, into: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        _copy_dataset(source, into)
    except DataError as error:
        os._exit(7 if f"data.local_cache={into}: cannot be written" in str(error) else 8)


def test_full_disk_is_reported_in_one_line(dataset: Path, tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_copy_with_file_size_limit, args=(dataset, tmp_path / "full")
    )
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert not list(tmp_path.rglob("*.partial")) and not list(tmp_path.rglob("train*.arrow"))
    assert MANIFEST_FILE not in [path.name for path in tmp_path.rglob("*")]
