import json
import pickle

import numpy as np
import pytest

from raytrain_hpc.data.tokenizer.base import (
    ByteTokenizer,
    CharTokenizer,
    collect_characters,
    parse_tokenizer_spec,
)
from raytrain_hpc.data.tokenizer.bpe import train_tokenizer
from raytrain_hpc.data.tokenizer.registry import load_tokenizer, tokenizer_from_json
from raytrain_hpc.errors import DataError
from tests.data.preprocess.input_corpus import write_rank_file

TEXT = "naïve 中文 😀\r\n\ttail"


def test_byte_tokenizer_encodes_utf8():
    ids = ByteTokenizer().encode(TEXT)
    assert ids.dtype == np.int64
    assert bytes(ids.tolist()) == TEXT.encode()
    assert ByteTokenizer().decode(ids) == TEXT
    assert ByteTokenizer().decode([0xFF, 65]) == "\ufffdA"


def test_byte_tokenizer_restores_surrogate_escaped_bytes():
    assert ByteTokenizer().encode(b"a\xff".decode("utf-8", "surrogateescape")).tolist() == [97, 255]


def test_char_ids_follow_sorted_order():
    chars = sorted(set(TEXT))
    tokenizer = CharTokenizer(collect_characters([TEXT[:5], TEXT[5:]]))
    assert tokenizer.vocab_size == len(chars)
    assert tokenizer.encode(TEXT).tolist() == [chars.index(c) for c in TEXT]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("").tolist() == []


@pytest.mark.parametrize("unknown", ["z", "\U0010ffff", "\x00"])
def test_unknown_character_is_reported_with_its_position(unknown):
    with pytest.raises(DataError, match=r"position 1"):
        CharTokenizer("abc").encode("a" + unknown)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharTokenizer("hello 😀")])
def test_json_round_trip(tokenizer):
    restored = tokenizer_from_json(json.loads(json.dumps(tokenizer.to_json())))
    assert restored.name == tokenizer.name
    assert restored.vocab_size == tokenizer.vocab_size
    assert restored.encode("hello").tolist() == tokenizer.encode("hello").tolist()


def test_ids_outside_the_vocabulary_raise():
    for ids in ([3], [-1]):
        with pytest.raises(DataError, match="outside the vocabulary of 3"):
            CharTokenizer("abc").decode(ids)


def test_unknown_tokenizer_error_lists_the_known_ones():
    with pytest.raises(DataError, match="byte, char"):
        parse_tokenizer_spec("word")
    with pytest.raises(DataError, match="byte, char"):
        tokenizer_from_json({"name": "word"})
    with pytest.raises(DataError, match="needs text"):
        CharTokenizer(collect_characters([]))


def test_bpe_tokenizers_survive_pickle_and_json(tmp_path):
    """Special tokens in the text are encoded as ordinary text."""
    text = "the reader's naïve 中文字 <|endoftext|> 😀\n\n  tail"
    trained = train_tokenizer([text] * 3, 280)
    ranked = load_tokenizer(parse_tokenizer_spec(f"tiktoken:{write_rank_file(tmp_path / 'ranks')}"))
    assert train_tokenizer([text] * 3, 280).to_json() == trained.to_json()
    for tokenizer in (trained, ranked):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_text not in ids.tolist()
        stored = json.loads(json.dumps(tokenizer.to_json()))
        for restored in (pickle.loads(pickle.dumps(tokenizer)), tokenizer_from_json(stored)):
            assert restored.encode(text).tolist() == ids.tolist()
            assert (restored.vocab_size, restored.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert (ranked.vocab_size, ranked.end_of_text) == (269, 268)


def test_end_of_text_comes_from_tokenizer_config(tmp_path):
    (tmp_path / "tokenizer.json").write_text(train_tokenizer(["abc"], 257).to_json()["tokenizer"])
    assert load_tokenizer(parse_tokenizer_spec(f"hf:{tmp_path}")).end_of_text == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "a"}}')
    tokenizer = load_tokenizer(parse_tokenizer_spec(f"hf:{tmp_path}"))
    assert tokenizer.decode([tokenizer.end_of_text]) == "a"
