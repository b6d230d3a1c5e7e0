import errno
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raytrain_hpc.data.dataset.manifest import Manifest
from raytrain_hpc.data.dataset.token_shards import ShardWriter, TokenArray, choose_token_dtype
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import ReadRetry

DESCRIPTORS = Path("/proc/self/fd")


def write_split(directory, tokens, shard_tokens, dtype="uint16", chunk=37, ends=(), counted=None):
    """Write `tokens` as the train split of a dataset, appended in chunks that do not align with the shards."""
    writer = ShardWriter(directory, "train", dtype, shard_tokens, masked=counted is not None)
    for start in range(0, len(tokens), chunk):
        rows = slice(start, start + chunk)
        inside = [end - start for end in ends if start < end <= start + chunk]
        writer.append(tokens[rows], inside, None if counted is None else counted[rows])
    split = writer.close()
    return Manifest({"name": "byte"}, 256, dtype, counted is not None, None, {}, (), {"train": split})


@pytest.mark.parametrize("shard_tokens", [3, 64, 100, 1000, 5000])
def test_windows_equal_slices_of_the_original_array(tmp_path, shard_tokens):
    tokens = np.random.default_rng(0).integers(0, 1 << 16, 1000)
    array = TokenArray.open(tmp_path, write_split(tmp_path, tokens, shard_tokens), "train")
    assert array.num_tokens == 1000
    for length in (1, 9, 65, 700, 1000):
        starts = np.arange(0, 1000 - length + 1, 13)
        assert np.array_equal(array.read(starts, length), np.stack([tokens[s : s + length] for s in starts]))


def test_shard_is_a_standard_arrow_file(tmp_path):
    tokens = np.arange(70_000)
    write_split(tmp_path, tokens, 50_000, dtype="uint32")
    tables = [pa.ipc.open_file(path).read_all() for path in sorted(tmp_path.glob("*.arrow"))]
    assert [len(t["tokens"][0]) for t in tables] == [50_000, 20_000]
    assert tables[0].schema == pa.schema([("tokens", pa.large_list(pa.uint32())), ("ends", pa.large_list(pa.int64()))])
    assert np.array_equal(np.concatenate([t["tokens"].combine_chunks().values.to_numpy() for t in tables]), tokens)


def test_manifest_has_the_byte_offset_of_the_tokens(tmp_path):
    tokens = np.arange(1000)
    manifest = write_split(tmp_path, tokens, 300, dtype="uint32", ends=(5, 700))
    arrays = [
        np.frombuffer((tmp_path / shard.file).read_bytes(), dtype="<u4", count=shard.tokens, offset=shard.offset)
        for shard in manifest.splits["train"].shards
    ]
    assert np.array_equal(np.concatenate(arrays), tokens)


ENDS = (1, 2, 37, 38, 100, 101, 400, 999, 1000)


@pytest.mark.parametrize("shard_tokens", [5, 37, 100, 5000])
@pytest.mark.parametrize("last", [True, False])
def test_document_ids_and_spans_match_a_direct_count(tmp_path, shard_tokens, last):
    """Check that the end of a split ends its last document even if that end is not given."""
    tokens = np.arange(1000)
    manifest = write_split(tmp_path, tokens, shard_tokens, ends=ENDS if last else ENDS[:-1])
    array = TokenArray.open(tmp_path, manifest, "train")
    assert array.num_documents == manifest.splits["train"].documents == len(ENDS)
    starts, stops = array.get_document_spans(np.arange(len(ENDS)))
    assert stops.tolist() == list(ENDS)
    assert starts.tolist() == [0, *ENDS[:-1]]
    for length in (1, 9, 70, 1000):
        windows = np.arange(0, 1000 - length + 1, 3)
        expected = [[sum(w < end <= w + i for end in ENDS) for i in range(length)] for w in windows]
        assert array.read_document_ids(windows, length).tolist() == expected
    with pytest.raises(DataError, match="there are 9"):
        array.get_document_spans(np.array([9]))


def test_loss_mask_is_stored_with_the_tokens(tmp_path):
    counted = np.random.default_rng(1).integers(0, 2, 1000)
    array = TokenArray.open(tmp_path, write_split(tmp_path, np.arange(1000), 70, counted=counted), "train")
    starts = np.arange(0, 900, 7)
    assert np.array_equal(array.read_loss_mask(starts, 90), np.stack([counted[s : s + 90] for s in starts]))
    assert np.array_equal(
        pickle.loads(pickle.dumps(array)).read_loss_mask(starts, 90), array.read_loss_mask(starts, 90)
    )
    (tmp_path / "plain").mkdir()
    plain = TokenArray.open(tmp_path / "plain", write_split(tmp_path / "plain", np.arange(10), 70), "train")
    assert plain.read_loss_mask(np.array([3]), 4).all()


def test_shards_are_mapped_without_open_descriptors(tmp_path):
    array = TokenArray.open(tmp_path, write_split(tmp_path, np.arange(1000), 10), "train")
    if DESCRIPTORS.is_dir():
        before = len(list(DESCRIPTORS.iterdir()))
        array.read(np.arange(0, 990, 10), 10)
        assert len(list(DESCRIPTORS.iterdir())) <= before
    assert not array._get_shard(3).tokens.flags.owndata
    assert not array._get_shard(3).tokens.flags.writeable


def test_pickle_holds_paths_and_no_tokens(tmp_path):
    array = TokenArray.open(tmp_path, write_split(tmp_path, np.arange(60_000), 30_000), "train")
    expected = array.read(np.array([29_990]), 20)
    data = pickle.dumps(array)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data).read(np.array([29_990]), 20), expected)


def test_arrays_can_be_concatenated(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = TokenArray.open(tmp_path / "a", write_split(tmp_path / "a", np.arange(50), 20), "train")
    second = TokenArray.open(tmp_path / "b", write_split(tmp_path / "b", np.arange(100, 130), 20), "train")
    expected = np.concatenate([np.arange(50), np.arange(100, 130)])
    assert np.array_equal((first + second).read(np.array([45, 0]), 35), np.stack([expected[45:80], expected[:35]]))


def test_windows_out_of_range_raise(tmp_path):
    array = TokenArray.open(tmp_path, write_split(tmp_path, np.arange(100), 30), "train")
    for start in (-1, 96):
        with pytest.raises(DataError, match="100 tokens"):
            array.read(np.array([0, start]), 5)
    assert array.read(np.array([], dtype=np.int64), 5).shape == (0, 5)


def test_invalid_shard_file_is_named(tmp_path):
    manifest = write_split(tmp_path, np.arange(100), 30)
    array = TokenArray.open(tmp_path, manifest, "train")
    (tmp_path / "train-00001.arrow").write_bytes(b"not arrow at all")
    with pytest.raises(DataError, match="train-00001"):
        array.read(np.array([25]), 20)
    (tmp_path / "other").mkdir()
    write_split(tmp_path / "other", np.arange(5), 5)
    (tmp_path / "other" / "train-00000.arrow").replace(tmp_path / "train-00002.arrow")
    with pytest.raises(DataError, match="5 tokens .* instead of 30"):
        array.read(np.array([70]), 5)
    with pytest.raises(DataError, match="no split 'val', only train"):
        TokenArray.open(tmp_path, manifest, "val")


def test_opening_a_shard_is_repeated_unless_it_is_missing(tmp_path, monkeypatch):
    manifest = write_split(tmp_path, np.arange(100), 50)
    memory_map, errors = pa.memory_map, [OSError(errno.ESTALE, "Stale file handle")] * 2

    def fail_twice(path):
        if errors:
            raise errors.pop()
        return memory_map(path)

    monkeypatch.setattr(pa, "memory_map", fail_twice)
    lines = []
    array = TokenArray.open(tmp_path, manifest, "train", ReadRetry(30.0, lines.append))
    assert array.read(np.array([45]), 10).tolist() == [list(range(45, 55))]
    assert "train-00000.arrow cannot be read" in lines[0] and "train-00000.arrow is read again" in lines[1]
    errors.append(OSError(errno.ESTALE, "Stale file handle"))
    with pytest.raises(DataError, match=r"train-00000\.arrow: cannot be read \(.*Stale file handle\)$"):
        TokenArray.open(tmp_path, manifest, "train").read(np.array([0]), 10)
    lines.clear()
    (tmp_path / "train-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"train-00001\.arrow: not a readable shard .*; prepare the dataset again"):
        TokenArray.open(tmp_path, manifest, "train", ReadRetry(30.0, lines.append)).read(np.array([60]), 10)
    assert not lines


def test_the_stored_type_follows_the_vocabulary():
    assert [choose_token_dtype(n) for n in (65, 1 << 16, (1 << 16) + 1)] == ["uint16", "uint16", "uint32"]
