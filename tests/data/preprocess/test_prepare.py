import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import raytrain_hpc.data.preprocess.chunks as chunks_module
import raytrain_hpc.data.preprocess.partition as partition_module
from raytrain_hpc.data.dataset.inspect import describe, format_summary
from raytrain_hpc.data.dataset.manifest import load_manifest, verify_shards
from raytrain_hpc.data.dataset.token_shards import ShardWriter, TokenArray
from raytrain_hpc.data.preprocess.assemble import compute_split_sizes
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.errors import DataError

TEXT = "Ein Fluß, 中文 und 😀.\r\nNeue Zeile\n" * 40


def read_tokens(directory):
    """Read all tokens of a dataset by split."""
    manifest = load_manifest(directory)
    arrays = {name: TokenArray.open(directory, manifest, name) for name in manifest.splits}
    return {name: array.read(np.array([0]), array.num_tokens)[0] for name, array in arrays.items()}


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


def test_tinyshakespeare_has_the_token_counts_of_nanogpt(tmp_path):
    candidates = [p / "shared/data/tinyshakespeare.txt" for p in Path(__file__).resolve().parents]
    text = next((p for p in candidates if p.is_file()), None)
    if text is None:
        pytest.skip("shared/data/tinyshakespeare.txt not found; generated text tests the same logic")
    manifest = prepare([text], tmp_path / "out", tokenizer="char")
    assert (
        format_summary(manifest) == "1,115,394 characters, vocabulary 65, 1,003,854 train and 111,540 validation tokens"
    )
    data = text.read_text()
    chars = sorted(set(data))
    assert read_tokens(tmp_path / "out")["val"].tolist() == [chars.index(c) for c in data[int(len(data) * 0.9) :]]


def test_char_tokens_are_split_as_in_nanogpt(tmp_path, text_file):
    manifest = prepare([text_file], tmp_path / "out", tokenizer="char")
    chars = sorted(set(TEXT))
    ids = [chars.index(c) for c in TEXT]
    num_train = int(len(ids) * 0.9)
    stored = read_tokens(tmp_path / "out")
    assert stored["train"].tolist() == ids[:num_train]
    assert stored["val"].tolist() == ids[num_train:]
    assert (manifest.characters, manifest.vocab_size) == (len(TEXT), len(chars))
    assert load_manifest(tmp_path / "out") == manifest


def test_split_sizes_are_exact():
    for total in [*range(20, 3000), 1_115_394, 10**12]:
        assert compute_split_sizes(total, 0.1)["train"] == int(total * 0.9) == total * 9 // 10
        assert compute_split_sizes(total, 0.9)["train"] == total // 10
    assert compute_split_sizes(7, 0.0) == {"train": 7}


@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_characters_may_span_blocks(tmp_path, text_file, monkeypatch, block):
    monkeypatch.setattr(partition_module, "BLOCK_BYTES", block)
    manifest = prepare([text_file], tmp_path / "out", tokenizer="char", shard_tokens=100)
    decoded = tokenizer_from_json(manifest.tokenizer).decode(
        np.concatenate(list(read_tokens(tmp_path / "out").values()))
    )
    assert decoded == TEXT


def test_byte_tokenizer_keeps_text_of_any_encoding(tmp_path):
    raw = bytes(range(1, 256)) * 4  # no NUL, which only binary files have
    (tmp_path / "raw.bin").write_bytes(raw)
    manifest = prepare([tmp_path / "raw.bin"], tmp_path / "out", val_fraction=0.25)
    assert format_summary(manifest) == "1,020 bytes, vocabulary 256, 765 train and 255 validation tokens"
    assert bytes(np.concatenate(list(read_tokens(tmp_path / "out").values())).tolist()) == raw


def test_folder_is_read_in_order_of_relative_paths(tmp_path):
    for name, text in [("b.txt", "2"), ("a/z.txt", "1"), ("a.txt", "0"), ("c/empty.txt", ""), ("c/d.txt", "33")]:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    manifest = prepare([tmp_path / "in"], tmp_path / "out", val_fraction=0)
    assert bytes(read_tokens(tmp_path / "out")["train"].tolist()) == b"01233"
    assert [i.name for i in manifest.inputs] == ["a.txt", "a/z.txt", "b.txt", "c/d.txt", "c/empty.txt"]
    assert list(manifest.splits) == ["train"]


def test_progress_ends_at_the_total(tmp_path, text_file):
    seen = []
    prepare([text_file], tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    size = text_file.stat().st_size
    assert seen[-1] == (2 * size, 2 * size)
    assert seen == sorted(seen)


def test_dataset_hash_depends_on_content_only(tmp_path, text_file):
    (tmp_path / "copy.txt").write_bytes(text_file.read_bytes())
    first = prepare([text_file], tmp_path / "a").dataset_hash
    assert prepare([tmp_path / "copy.txt"], tmp_path / "b").dataset_hash == first
    assert prepare([text_file], tmp_path / "c", tokenizer="char").dataset_hash != first
    (tmp_path / "copy.txt").write_bytes(text_file.read_bytes()[:-1] + b"!")
    assert prepare([tmp_path / "copy.txt"], tmp_path / "d").dataset_hash != first


def test_same_dataset_is_reused_and_a_different_one_never_overwritten(tmp_path, text_file, monkeypatch):
    first = prepare([text_file], tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr(ShardWriter, "append", None)  # writing again would fail
        assert prepare([text_file], tmp_path / "out") == first
    for change in ({"tokenizer": "char"}, {"val_fraction": 0.2}, {"shard_tokens": 50}):
        with pytest.raises(DataError, match="other inputs or settings"):
            prepare([text_file], tmp_path / "out", **change)
    text_file.write_text("something else")
    with pytest.raises(DataError, match="other inputs or settings"):
        prepare([text_file], tmp_path / "out")
    verify_shards(tmp_path / "out", first)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_preparation_is_resumed(tmp_path, text_file, monkeypatch, interruption):
    """Check that after any interruption, the next call completes the same dataset and leaves no other files."""
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 400)
    expected = prepare([text_file], tmp_path / "expected", shard_tokens=150).dataset_hash
    append = ShardWriter.append
    for allowed in range(7):
        calls = []

        def fail_later(self, *columns, allowed=allowed, calls=calls):
            calls.append(columns)
            if len(calls) > allowed:
                raise interruption
            append(self, *columns)

        with monkeypatch.context() as patched, pytest.raises((KeyboardInterrupt, DataError)) as stopped:
            patched.setattr(ShardWriter, "append", fail_later)
            prepare([text_file], tmp_path / "out", shard_tokens=150)
        assert stopped.type is KeyboardInterrupt or "repeat the same command to resume" in str(stopped.value)
        assert not (tmp_path / "out").exists()
        with monkeypatch.context() as patched:
            patched.setattr(chunks_module, "write_chunk", None)  # encoding again would fail
            assert prepare([text_file], tmp_path / "out", shard_tokens=150).dataset_hash == expected
        verify_shards(tmp_path / "out", load_manifest(tmp_path / "out"))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["expected", "out", "text.txt"]
        shutil.rmtree(tmp_path / "out")


def test_leftovers_of_other_settings_are_discarded(tmp_path, text_file, monkeypatch):
    expected = prepare([text_file], tmp_path / "expected", tokenizer="char").dataset_hash
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(ShardWriter, "append", None)
        prepare([text_file], tmp_path / "out")
    assert (tmp_path / ".out.preparing" / "chunks" / "chunk-000000.json").exists()
    assert prepare([text_file], tmp_path / "out", tokenizer="char").dataset_hash == expected


def test_concurrent_preparations_agree(tmp_path, text_file):
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(prepare([text_file], tmp_path / "out"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len({m.dataset_hash for m in results}) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "text.txt"]


def test_input_that_changes_during_preparation_raises(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(partition_module, "PARTITION_BYTES", 400)

    def grow(done, total):
        text_file.write_bytes(TEXT.encode() + b"more")

    with pytest.raises(DataError, match="text.txt: changed while it was prepared"):
        prepare([text_file], tmp_path / "out", progress=grow)
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("prefix", [0, 3, 4, 61])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8", b"\xe4\xb8x"])
def test_invalid_utf8_is_reported_with_its_byte_offset(tmp_path, monkeypatch, prefix, bad):
    monkeypatch.setattr(partition_module, "BLOCK_BYTES", 4)
    raw = b"a" * prefix + bad
    (tmp_path / "latin.txt").write_bytes(raw)
    with pytest.raises(UnicodeDecodeError) as expected:
        raw.decode()
    with pytest.raises(DataError, match=rf"latin.txt: byte {expected.value.start} is not UTF-8") as error:
        prepare([tmp_path / "latin.txt"], tmp_path / "out", tokenizer="char")
    assert "\n" not in str(error.value)


def test_invalid_inputs_and_settings_raise(tmp_path, text_file):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    out = tmp_path / "out"
    cases = [
        ([tmp_path / "nowhere.txt"], {}, "nowhere.txt: no such file"),
        ([tmp_path / "empty.txt"], {}, "empty.txt: the file is empty"),
        ([tmp_path / "folder"], {}, "folder: the folder has no files"),
        ([], {}, "nothing to prepare"),
        ([text_file], {"val_fraction": 1.0}, "val_fraction=1.0"),
        ([text_file], {"val_fraction": -0.1}, "val_fraction=-0.1"),
        ([text_file], {"val_fraction": 0.0001}, "left for val"),
        ([text_file], {"val_fraction": 0.9999}, "left for train"),
        ([text_file], {"shard_tokens": 0}, "shard_tokens=0"),
        ([text_file], {"tokenizer": "bpe"}, "tokenizer='bpe': unknown; known are byte, char, tiktoken:FILE"),
    ]
    for inputs, settings, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(inputs, out, **settings)
    (tmp_path / "folder" / "empty").touch()
    with pytest.raises(DataError, match="hold no text"):
        prepare([tmp_path / "folder"], out)
    assert not out.exists()


def test_invalid_targets_raise(tmp_path, text_file):
    with pytest.raises(DataError, match="text.txt: is a file"):
        prepare([text_file], text_file)
    (tmp_path / "empty").mkdir()
    prepare([text_file], tmp_path / "empty")  # an empty directory may be filled
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(DataError, match="contains other files"):
        prepare([text_file], tmp_path / "other")
    with pytest.raises(DataError, match="cannot be written"):
        prepare([text_file], text_file / "below")


def test_current_directory_can_be_the_target(tmp_path, text_file, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    prepare([text_file], ".")
    verify_shards(tmp_path / "here", load_manifest(tmp_path / "here"))


def test_describe_dataset(tmp_path, text_file):
    manifest = prepare([text_file], tmp_path / "out", tokenizer="char", shard_tokens=500)
    text = describe(tmp_path / "out")
    assert format_summary(manifest) in text
    assert manifest.dataset_hash in text
    assert "  | Ein Fluß, 中文 und 😀.\\r\n" in text


def test_target_can_be_a_link_to_an_empty_directory_among_the_inputs(tmp_path, text_file):
    (tmp_path / "in").mkdir()
    text_file.rename(tmp_path / "in" / "text.txt")
    (tmp_path / "in" / "real").mkdir()
    (tmp_path / "link").symlink_to("in/real")
    (tmp_path / "input_link").symlink_to("in")
    manifest = prepare([tmp_path / "in"], tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and load_manifest(tmp_path / "in" / "real") == manifest
    assert prepare([tmp_path / "input_link"], tmp_path / "link") == manifest  # the dataset is none of the inputs
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["real", "text.txt"]


def test_mount_point_as_target_is_refused_before_the_work(tmp_path, text_file, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == tmp_path / "disk")
    with pytest.raises(DataError, match="disk: is a mount point.*choose a directory below it"):
        prepare([text_file], tmp_path / "disk")
    assert not (tmp_path / ".disk.preparing").exists()
    prepare([text_file], tmp_path / "disk" / "out")
