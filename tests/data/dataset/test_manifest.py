import hashlib
import json
import re

import pytest

from raytrain_hpc.data.dataset.inspect import describe
from raytrain_hpc.data.dataset.manifest import load_manifest, verify_shards
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.errors import DataError


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "in.txt").write_text("some text to train on\n" * 50)
    prepare([tmp_path / "in.txt"], tmp_path / "out", shard_tokens=300)
    return tmp_path / "out"


def edit_manifest(dataset, change):
    path = dataset / "manifest.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_manifest_has_size_and_checksum_of_every_file(dataset):
    manifest = load_manifest(dataset)
    shards = [s for split in manifest.splits.values() for s in split.shards]
    assert sorted(s.file for s in shards) == sorted(p.name for p in dataset.glob("*.arrow"))
    for shard in shards:
        raw = (dataset / shard.file).read_bytes()
        assert (shard.bytes, shard.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    assert verify_shards(dataset, manifest) == sum(s.bytes for s in shards)


def test_verification_finds_a_flipped_byte_in_hashed_shards(dataset):
    manifest = load_manifest(dataset)
    path = dataset / "train-00001.arrow"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="train-00001.arrow: shard does not match its sha256"):
        verify_shards(dataset, manifest)
    with pytest.raises(DataError, match="train-00001"):
        describe(dataset)
    first = manifest.splits["train"].shards[0].bytes
    assert verify_shards(dataset, manifest, limit_bytes=first) == first
    assert verify_shards(dataset, manifest, limit_bytes=0) == 0


def test_verification_always_finds_truncated_and_missing_shards(dataset):
    manifest = load_manifest(dataset)
    path = dataset / "val-00000.arrow"
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    with pytest.raises(DataError, match=f"val-00000.arrow: shard has {len(raw) - 1} bytes instead of {len(raw)}"):
        verify_shards(dataset, manifest, limit_bytes=0)
    path.unlink()
    with pytest.raises(DataError, match="val-00000.arrow: shard is missing"):
        verify_shards(dataset, manifest, limit_bytes=0)


def test_loading_a_non_dataset_suggests_prepare(tmp_path, dataset):
    with pytest.raises(DataError, match="no such directory.*raytrain-hpc prepare"):
        load_manifest(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not a dataset.*raytrain-hpc prepare"):
        load_manifest(tmp_path)
    with pytest.raises(DataError, match="not a dataset"):
        load_manifest(dataset / "manifest.json")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\xff", '"text"', '{"version": 2}'])
def test_damaged_manifest_is_reported_in_one_line(dataset, content):
    (dataset / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"manifest.json: damaged") as error:
        load_manifest(dataset)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=1), "version=1 is not supported"),
        (lambda d: d["splits"]["train"]["shards"].pop(), "do not add up"),
        (lambda d: d["splits"]["train"]["shards"][0].update(sha256="0" * 64), "dataset_hash does not match"),
        (lambda d: d["splits"]["train"]["shards"][0].update(file="../in.txt"), "outside the directory"),
        (lambda d: d["tokenizer"].update(name="char"), "dataset_hash does not match"),
    ],
)
def test_edited_manifest_is_rejected(dataset, change, message):
    edit_manifest(dataset, change)
    with pytest.raises(DataError, match=re.escape(message)):
        load_manifest(dataset)
