"""Locations of run directories: URLs and local paths."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from raytrain_hpc.storage.location import (
    list_directory_names,
    make_absolute,
    parse_location,
    read_chunks,
    write_atomically,
)
from raytrain_hpc.storage.object_path import ObjectPath


@pytest.mark.parametrize(
    "url", ["s3:/x", "http://x/y", "s3://", "s3:///a", "s3://b/a//c", "s3://b/../c", "s3://b/a?x=1"]
)
def test_other_urls_are_refused(url):
    with pytest.raises(ValueError, match="needs"):
        ObjectPath.from_url(url)


def test_urls_are_normalized_and_paths_are_joined():
    path = ObjectPath.from_url("gs://bucket/runs/a/")
    assert str(path) == "gs://bucket/runs/a" and path.name == "a"
    assert str(path / "tb" / "x") == "gs://bucket/runs/a/tb/x"
    assert str(ObjectPath.from_url("az://container") / "a") == "az://container/a"
    assert pickle.loads(pickle.dumps(path)) == path


def test_paths_and_urls_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_location("runs/a") == Path("runs/a") and parse_location("~/a") == Path.home() / "a"
    assert parse_location("s3://bucket/a") == ObjectPath("s3", "bucket", "a")
    assert make_absolute("runs/a") == str(tmp_path / "runs" / "a") and make_absolute("s3://bucket/a") == "s3://bucket/a"


def test_local_files(tmp_path):
    write_atomically(tmp_path / "file", b"0123456789")
    write_atomically(tmp_path / "file", b"abcdefghij")
    (tmp_path / "directory").mkdir()
    assert b"".join(read_chunks(tmp_path / "file", 10, 4)) == b"abcdefghij"
    assert list_directory_names(tmp_path) == ["directory"] and list_directory_names(tmp_path / "missing") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file"]
