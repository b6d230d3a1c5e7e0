import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raytrain_hpc.data.manifest import Manifest
from raytrain_hpc.data.shards import ShardWriter, TokenArray, token_dtype
from raytrain_hpc.errors import DataError

DESCRIPTORS = Path("/proc/self/fd")


def written(directory, tokens, shard_tokens, dtype="uint16", chunk=37):
    """`tokens` as the train split of a dataset, appended in chunks that do not match the shards."""
    writer = ShardWriter(directory, "train", dtype, shard_tokens)
    for start in range(0, len(tokens), chunk):
        writer.append(tokens[start : start + chunk])
    return Manifest({"name": "byte"}, 256, dtype, None, {}, (), {"train": writer.close()})


@pytest.mark.parametrize("shard_tokens", [1, 7, 64, 100, 1000, 5000])
def test_windows_equal_slices_of_the_plain_array(tmp_path, shard_tokens):
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 1000)
    array = TokenArray.open(tmp_path, written(tmp_path, tokens, shard_tokens), "train")
    assert array.num_tokens == 1000
    for length in (1, 9, 65, 700, 1000):
        starts = np.arange(0, 1000 - length + 1, 13)
        assert np.array_equal(array.read(starts, length), np.stack([tokens[s : s + length] for s in starts]))


def test_a_shard_is_an_ordinary_arrow_file(tmp_path):
    tokens = np.arange(70_000)
    written(tmp_path, tokens, 50_000, dtype="uint32")
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(tmp_path.glob("*.arrow"))]
    assert [t.num_rows for t in tables] == [50_000, 20_000]
    assert tables[0].schema == pa.schema([("tokens", pa.uint32())])
    assert np.array_equal(pa.concat_tables(tables)["tokens"].to_numpy(), tokens)


def test_reading_is_in_place_and_leaves_no_file_open(tmp_path):
    array = TokenArray.open(tmp_path, written(tmp_path, np.arange(1000), 10), "train")
    if DESCRIPTORS.is_dir():
        before = len(list(DESCRIPTORS.iterdir()))
        array.read(np.arange(0, 990, 10), 10)
        assert len(list(DESCRIPTORS.iterdir())) <= before
    assert not array._shard(3).flags.owndata
    assert not array._shard(3).flags.writeable


def test_pickling_carries_paths_not_tokens(tmp_path):
    array = TokenArray.open(tmp_path, written(tmp_path, np.arange(60_000), 30_000), "train")
    expected = array.read(np.array([29_990]), 20)
    data = pickle.dumps(array)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data).read(np.array([29_990]), 20), expected)


def test_arrays_can_follow_each_other(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = TokenArray.open(tmp_path / "a", written(tmp_path / "a", np.arange(50), 20), "train")
    second = TokenArray.open(tmp_path / "b", written(tmp_path / "b", np.arange(100, 130), 20), "train")
    both = np.concatenate([np.arange(50), np.arange(100, 130)])
    assert np.array_equal((first + second).read(np.array([45, 0]), 35), np.stack([both[45:80], both[:35]]))


def test_windows_outside_are_refused(tmp_path):
    array = TokenArray.open(tmp_path, written(tmp_path, np.arange(100), 30), "train")
    for start in (-1, 96):
        with pytest.raises(DataError, match="100 tokens"):
            array.read(np.array([0, start]), 5)
    assert array.read(np.array([], dtype=np.int64), 5).shape == (0, 5)


def test_a_file_that_is_no_shard_is_named(tmp_path):
    manifest = written(tmp_path, np.arange(100), 30)
    array = TokenArray.open(tmp_path, manifest, "train")
    (tmp_path / "train-00001.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(DataError, match="train-00001"):
        array.read(np.array([25]), 20)
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", np.arange(5), 5)
    (tmp_path / "other" / "train-00000.arrow").replace(tmp_path / "train-00002.arrow")
    with pytest.raises(DataError, match="5 tokens .* instead of 30"):
        array.read(np.array([70]), 5)
    with pytest.raises(DataError, match="no split 'val', only train"):
        TokenArray.open(tmp_path, manifest, "val")


def test_the_stored_type_follows_the_vocabulary():
    assert [token_dtype(n) for n in (65, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]
